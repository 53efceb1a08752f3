"""The head whose rows, one for each id of the vocabulary, are spread over the ranks of a pipeline."""

from slipstream.model.vocabulary.head_check import find_spreadable_head
from slipstream.model.vocabulary.head_rows import HeadRows, RowLosses, RowSoftmax, SpreadHead, combine
