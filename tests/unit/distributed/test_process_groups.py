from concurrent.futures import ThreadPoolExecutor

from torch.distributed import HashStore

from gnmr_megatron.distributed.process_groups import _agree_on_attempt

RANKS = 4


def attempt(store):
    with ThreadPoolExecutor(RANKS) as pool:
        names = [pool.submit(_agree_on_attempt, store, rank, RANKS) for rank in range(RANKS)]
        return [name.result(timeout=20) for name in names]


def test_ranks_that_start_together_share_a_name_that_no_earlier_start_had():
    store = HashStore()  # as torchrun's, it outlives the ranks
    names = [attempt(store) for _ in range(5)]
    assert all(len(set(shared)) == 1 for shared in names)
    assert len({shared[0] for shared in names}) == 5


def test_an_attempt_that_died_half_way_does_not_confuse_the_next():
    store = HashStore()
    for rank in (1, 3):
        store.set(f"attempt/asks/{rank}", f"dead{rank}")
    assert len(set(attempt(store))) == 1
