"""The head, and an embedding tied to it, whose rows are spread over the ranks of a pipeline: one row for each id."""

from slipstream.model.vocabulary.head_check import HeadNames, find_spreadable_head
from slipstream.model.vocabulary.head_rows import HeadRows, RowLosses, RowSoftmax, SpreadHead, combine
from slipstream.model.vocabulary.tied_rows import TiedRows
