import fcntl
import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gnmr_megatron.data import dataset
from gnmr_megatron.data.batches import Batch, TrainBatches, fixed_batches
from gnmr_megatron.data.config import DataConfig
from gnmr_megatron.data.dataset import open_datasets
from gnmr_megatron.data.manifest import describe_datasets
from gnmr_megatron.data.prepare import PrepareRequest, prepare
from gnmr_megatron.data.tokenizer import load_tokenizer
from gnmr_megatron.errors import ConfigError, DataError


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    """The engine builds the order of a blend on rank 0 of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two datasets of one tokenizer whose texts can be told apart."""
    folder = tmp_path_factory.mktemp("prepared")
    for name, word in (("a", "alpha"), ("b", "omega")):
        (folder / f"{name}.jsonl").write_text(
            "".join(
                f'{{"text": "{word} {number} {word} {number * 31} {word}"}}\n'
                for number in range(800)
            )
        )
    both = (str(folder / "a.jsonl"), str(folder / "b.jsonl"))
    prepare(PrepareRequest(inputs=both, output=folder / "both", vocab_size=400))
    tokenizer = folder / "both/tokenizer.model"
    for name in ("a", "b"):
        prepare(
            PrepareRequest(
                inputs=(str(folder / f"{name}.jsonl"),), output=folder / name, tokenizer=tokenizer
            )
        )
    return folder


def open_all(prepared, names=("a",), weights=None, samples=64, seed=1, **changes):
    config = DataConfig(
        datasets=[str(prepared / name) for name in names],
        weights=weights,
        split="90,10,0",
        sequence_length=16,
        **changes,
    )
    return open_datasets(
        config, describe_datasets(config), train_samples=samples, valid_samples=8, seed=seed
    )


def batches(dataset, *, rank=0, ranks=1, consumed=0, workers=0):
    return TrainBatches(
        dataset,
        micro_batch_size=2,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        consumed_samples=consumed,
        num_workers=workers,
    )


def tokens(source, count):
    return torch.cat([next(source).tokens for _ in range(count)])


def test_labels_are_the_tokens_one_place_on(prepared):
    batch = next(batches(open_all(prepared).train))
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (2, 16)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert torch.equal(batch.position_ids[0], torch.arange(16))
    assert batch.loss_mask.min() == 1


def test_ranks_share_the_samples_of_one_rank_without_overlap(prepared):
    dataset = open_all(prepared).train
    one = tokens(batches(dataset), 12).view(3, 4, 2, 16)  # [step, rank x microbatch of 2, ...]
    for rank in range(4):
        mine = tokens(batches(dataset, rank=rank, ranks=4), 3).view(3, 2, 16)
        assert torch.equal(mine, one[:, rank])


@pytest.mark.parametrize("workers", [0, 1])
def test_reading_goes_on_exactly_from_the_consumed_samples(prepared, workers):
    dataset = open_all(prepared).train
    whole = tokens(batches(dataset), 20)
    assert torch.equal(tokens(batches(dataset, consumed=14, workers=workers), 10), whole[14:34])


def test_the_order_depends_on_the_seed_alone(prepared):
    first, again, other = (
        tokens(batches(open_all(prepared, seed=seed).train), 8) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_training_and_held_out_text_are_of_different_documents(prepared):
    data = open_all(prepared, samples=400)
    train = {tuple(row) for row in tokens(batches(data.train), 200).tolist()}
    valid = torch.cat([b.tokens for b in held_out(data.valid)])
    assert not any(tuple(row) in train for row in valid.tolist())


def held_out(dataset):
    return list(
        fixed_batches(
            dataset, num_samples=8, micro_batch_size=2, data_parallel_rank=0, data_parallel_size=1
        )
    )


def test_evaluations_see_the_same_sequences(prepared):
    dataset = open_all(prepared).valid
    first, second = held_out(dataset), held_out(dataset)
    assert len(first) == 4
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, second, strict=True))


def test_blended_datasets_are_drawn_by_their_weights(prepared):
    config = DataConfig(datasets=[str(prepared / "a")], sequence_length=16)
    tokenizer = load_tokenizer(prepared / "both/tokenizer.model")
    assert describe_datasets(config).vocab_size == tokenizer.vocab_size
    data = open_all(prepared, names=("a", "b"), weights=[0.8, 0.2], samples=400)
    drawn = [tokenizer.decode(row) for row in tokens(batches(data.train), 200).tolist()]
    share = np.mean([text.count("alpha") > text.count("omega") for text in drawn])
    assert share == pytest.approx(0.8, abs=0.02)


def test_using_up_the_planned_samples_is_an_error_that_tells_what_to_set(prepared):
    source = batches(open_all(prepared, samples=6).train, consumed=4)
    with pytest.raises(
        DataError,
        match=r"all \d+ planned training sequences are used; .* higher data\.train_samples",
    ):
        tokens(source, 1000)


def test_a_split_without_held_out_text_is_refused(prepared):
    config = DataConfig(datasets=[str(prepared / "a")], split="9999,0.001,0", sequence_length=16)
    with pytest.raises(
        DataError,
        match=r"data\.split: '9999,0\.001,0' leaves no document of the 800 in .* for held-out",
    ):
        open_datasets(config, describe_datasets(config), train_samples=8, valid_samples=8, seed=1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"datasets": []}, r"data\.datasets: names no dataset"),
        (
            {"weights": [1.0, 2.0]},
            r"data\.weights: .* must hold one positive number for each of the 1",
        ),
        ({"split": "98,2"}, r"data\.split: '98,2' must be three shares"),
        ({"split": "0,2,1"}, r"data\.split: '0,2,1' must be three shares"),
        ({"sequence_length": 0}, r"data\.sequence_length must be at least 1"),
        ({"train_samples": 0}, r"data\.train_samples: 0 must be at least 1, or null"),
    ],
)
def test_values_out_of_range_are_refused_by_their_keys(fields, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(**fields)


def test_context_parallel_ranks_share_a_sequence_from_both_ends():
    tokens = torch.arange(16).view(1, 16)
    batch = Batch(tokens, tokens + 1, tokens.float(), tokens)
    parts = [batch.of_context_rank(rank, 2) for rank in range(2)]
    assert parts[0].tokens.tolist() == [[0, 1, 2, 3, 12, 13, 14, 15]]
    assert parts[1].tokens.tolist() == [[4, 5, 6, 7, 8, 9, 10, 11]]
    assert all(torch.equal(part.labels, part.tokens + 1) for part in parts)
    # as many keys before the tokens of either rank
    assert len({int(part.position_ids.sum()) for part in parts}) == 1
    assert batch.of_context_rank(0, 1) is batch


def test_an_order_that_a_killed_run_left_unfinished_is_made_again(prepared):
    whole = tokens(batches(open_all(prepared, samples=72).train), 36)
    files = sorted(
        (prepared / "a/index_cache").glob("*_index.npy"), key=lambda p: p.stat().st_mtime
    )
    content = files[-1].read_bytes()
    for left in (content[: len(content) // 2], b""):
        files[-1].write_bytes(left)
        assert torch.equal(tokens(batches(open_all(prepared, samples=72).train), 36), whole)
        assert files[-1].read_bytes() == content


def test_a_run_waits_while_another_writes_the_order(prepared):
    open_all(prepared, samples=80)
    opened = threading.Thread(target=open_all, args=(prepared,), kwargs={"samples": 80})
    with (prepared / "a/index_cache/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        opened.start()
        opened.join(timeout=1)
        assert opened.is_alive()
    opened.join(timeout=30)
    assert not opened.is_alive()


def test_a_run_that_waits_says_so_and_not_for_ever(prepared, monkeypatch):
    open_all(prepared, samples=80)
    monkeypatch.setattr(dataset, "LOCK_SECONDS", 0.5)
    with (prepared / "a/index_cache/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"index_cache: another run .* fuser .*/\.lock"):
            open_all(prepared, samples=80)


def test_an_order_that_is_there_is_used_where_nothing_can_be_written(prepared, tmp_path):
    expected = tokens(batches(open_all(prepared, samples=88).train), 44)
    lock = prepared / "a/index_cache/.lock"
    lock.unlink()
    lock.mkdir()  # so that it cannot be opened, not even by root
    try:
        assert torch.equal(tokens(batches(open_all(prepared, samples=88).train), 44), expected)
    finally:
        lock.rmdir()
