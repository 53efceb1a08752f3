"""What a Pipeline says of itself: how it is cut, and what to call in place of what it lacks."""

from slipstream.pipeline.answers.foreign_calls import ANSWERS
from slipstream.pipeline.answers.pipeline_facts import PipelineFacts
from slipstream.pipeline.answers.summary import summarise
