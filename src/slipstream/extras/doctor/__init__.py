"""Finds out what this machine can do, and what would keep a training from running here, before there is a model."""

from slipstream.extras.doctor.examination import Examination, examine
from slipstream.extras.doctor.finding import Finding
