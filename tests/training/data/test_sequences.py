"""Samples are packed whole, and sources mixed in their shares, the same on every rank and after every resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.model import IGNORED
from slipstream.train.data import (
    BatchSize,
    HeldOutBatches,
    MixedSequences,
    PackedSamples,
    TokenisedText,
    WholeDocuments,
    sequences_of,
)
from slipstream.train.data.packing import best_fit


def samples(lengths: list[int], first: int = 0) -> TokenisedText:
    """Sample s has the tokens 100 (s + first) onwards, of which the second half counts."""
    tokens = [np.arange(n, dtype=np.int32) + 100 * (number + first) for number, n in enumerate(lengths)]
    labels = [np.where(np.arange(len(each)) < len(each) // 2, -100, each).astype(np.int32) for each in tokens]
    return TokenisedText.join(tokens, labels)


def plain(lengths: list[int], first: int = 0) -> TokenisedText:
    """The tokens of `samples`, all of which count."""
    return replace(samples(lengths, first), labels=None)


LENGTHS = st.lists(st.integers(2, 12), min_size=1, max_size=30)


@given(lengths=LENGTHS, seed=st.sampled_from([None, 0, 3]))
def test_each_sample_comes_whole_and_once_an_epoch(lengths: list[int], seed: int | None) -> None:
    packed = PackedSamples(samples(lengths), 12, seed)
    found = []
    for index in range(packed.num_sequences, 2 * packed.num_sequences):  # of the second epoch
        batch = PackedSamples(samples(lengths), 12, seed).batch(index, 1)  # as a run that is resumed makes it
        ids, labels, documents = batch.input_ids[0], batch.labels[0], batch.document_ids[0]
        for document in sorted({*documents.tolist()} - {-1}):
            found.append((ids[documents == document].tolist(), labels[documents == document].tolist()))
        assert (labels[documents == -1] == -100).all()
        assert sum(batch.document_lengths()) == int((documents != -1).sum())
        assert batch.num_predicted == sum(
            sum(each != -100 for each in label[1:]) for _, label in found[-len({*documents.tolist()} - {-1}) :]
        )
    text = samples(lengths)
    expected = [(text.document(n).tolist(), text.labels_of(n).tolist()) for n in range(len(lengths))]
    assert sorted(found) == sorted(expected)


@given(lengths=LENGTHS)
def test_sequences_are_filled(lengths: list[int]) -> None:
    """No two of them would fit into one."""
    sizes = sorted(sum(lengths[sample] for sample in row) for row in best_fit(np.array(lengths), 12))
    assert sizes[-1] <= 12
    assert len(sizes) < 2 or sizes[0] + sizes[1] > 12


def test_samples_by_themselves_have_their_labels() -> None:
    batch = WholeDocuments(samples([3, 4]), 9, None).batch(0, 2)
    assert [each.tolist() for each in batch.labels] == [[-100, 1, 2], [-100, -100, 102, 103]]
    assert batch.num_predicted == 4


@pytest.mark.parametrize("packing", ["fixed", "none"])
def test_sources_without_weights_come_once_an_epoch(packing: str) -> None:
    texts = [samples([5, 5, 5]), TokenisedText.join([np.arange(10, dtype=np.int32) + 900 for _ in range(4)])]
    sequences = sequences_of(texts, packing, 10, seed=2)
    orders = []
    for epoch in range(2):
        numbers = range(epoch * sequences.num_sequences, (epoch + 1) * sequences.num_sequences)
        rows = [sequences_of(texts, packing, 10, seed=2).row(number).tokens for number in numbers]  # resumed each time
        tokens = Counter(int(token) for row in rows for token in row)
        assert all(tokens[token] == 1 for token in (101, 102, 103, 104, 201, 202, 203, 204))
        assert all(tokens[token] == 4 for token in range(900, 910))
        orders.append([int(row[0]) // 900 for row in rows])
    assert orders[0] != sorted(orders[0])


def test_weights_are_shares_and_sources_go_on_where_they_were() -> None:
    texts = [samples([10] * 12), samples([10] * 4, first=50)]
    mixed = sequences_of(texts, "fixed", 10, seed=0, weights=[1, 3])
    assert isinstance(mixed, MixedSequences)
    firsts = [int(mixed.row(index).tokens[0]) for index in range(3 * 16)]
    for epoch in range(3):
        assert sum(first >= 5000 for first in firsts[16 * epoch : 16 * (epoch + 1)]) == 12
    assert Counter(firsts) == {100 * number: 1 for number in range(12)} | {5000 + 100 * n: 9 for n in range(4)}
    with pytest.raises(SlipstreamError, match=r"number 1 has so small a weight that none of an epoch's 16 sequences"):
        sequences_of(texts, "fixed", 10, seed=0, weights=[0.01, 1])


def test_replicas_share_mixed_sequences() -> None:
    mixed = sequences_of([samples([3, 7, 4]), samples([9, 2, 5], first=50)], "none", 10, seed=1)
    shares = [mixed.batch(0, 6, replica, 2).input_ids for replica in range(2)]
    firsts = sorted(int(each[0]) for share in shares for each in share)
    assert firsts == [0, 100, 200, 5000, 5100, 5200]
    assert mixed.lengths(0, 6, 1, 2) == [len(each) for each in shares[1]]
    assert mixed.mean_length == 5
    assert mixed.typical_length == pytest.approx((9 + 49 + 16 + 81 + 4 + 25) / 30)
    assert torch.equal(shares[0][0], mixed.batch(0, 6, 0, 2).input_ids[0])


@pytest.mark.parametrize("packing", ["fixed", "none"])
@pytest.mark.parametrize("size", [BatchSize(4), BatchSize(1), BatchSize(1, tokens=40)], ids=str)
@pytest.mark.parametrize("make", [plain, samples], ids=["texts", "samples"])
def test_each_held_out_token_counts_once(make: Callable[..., TokenisedText], size: BatchSize, packing: str) -> None:
    """In batches of which the last is filled up, on two replicas, over two sources."""
    texts = [make([7, 3, 12, 5, 9, 6, 5]), make([4, 8], first=50)]
    if size.tokens and packing == "fixed":
        return
    sequences = sequences_of(texts, packing, 12, seed=None, pads=True)
    held_out, counted = HeldOutBatches(sequences, size), list[int]()
    for batch in held_out.chosen():
        for replica in range(2 if size.sequences % 2 == 0 else 1):
            found = held_out.batch(batch, replica, 2 if size.sequences % 2 == 0 else 1)
            counted += [int(label) for row in found.labels for label in row if label != IGNORED]
    assert sorted(counted) == sorted(token for text in texts for token in text.counted().tolist())


def test_pairs_that_fill_a_batch_up_are_told_apart() -> None:
    pairs = replace(samples([3, 4, 2, 5, 6, 3]), group_size=2)
    held_out = HeldOutBatches(sequences_of([pairs], "none", 12, seed=None), BatchSize(2))
    assert [held_out.counts(batch) for batch in held_out.chosen()] == [[True, True], [True, False]]
    both = [held_out.counts((2, 2), replica, 2) for replica in range(2)]
    assert sorted(both) == [[False], [True]]
