"""Distribution of problems over levels."""

from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.rng import philox_generator
from oncurve.tasks.puzzles.difficulty import Levels


def test_quotas_by_weight() -> None:
    levels = Levels.of(1, 3, None, "digits")
    assert levels.quotas(7, {1: 99, 2: 99, 3: 99}) == {1: 1, 2: 2, 3: 4}


def test_what_a_full_level_cannot_take_goes_up_and_then_down() -> None:
    levels = Levels.of(1, 3, (1, 1, 1), "digits")
    assert levels.quotas(9, {1: 1, 2: 99, 3: 99}) == {1: 1, 2: 5, 3: 3}
    assert levels.quotas(9, {1: 99, 2: 99, 3: 1}) == {1: 3, 2: 5, 3: 1}
    assert levels.quotas(9, {1: 1, 2: 1, 3: 1}) == {1: 1, 2: 1, 3: 1}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), min_size=1, max_size=5), st.integers(0, 100))
def test_quotas_fill_what_there_is(pairs: list[tuple[int, int]], count: int) -> None:
    weights = tuple(float(weight) for weight, _ in pairs)
    if sum(weights) == 0:
        weights = (1.0,) * len(pairs)
    room = {level: size for level, (_, size) in enumerate(pairs, start=1)}
    quotas = Levels.of(1, len(pairs), weights, "digits").quotas(count, room)
    usable = sum(size for level, size in room.items() if weights[level - 1])
    assert sum(quotas.values()) == min(count, usable)
    assert all(quotas[level] <= room[level] for level in room)


def test_a_level_without_weight_is_never_sampled() -> None:
    levels, rng = Levels.of(2, 4, (0, 1, 0), "digits"), philox_generator(0, "test")
    assert {levels.sample(rng) for _ in range(100)} == {3}


def test_streams_are_apart() -> None:
    places = [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (0, "a", 1 << 100)]
    first = [int(philox_generator(*place).integers(1 << 60)) for place in places]
    assert len(set(first)) == 5
    assert first == [int(philox_generator(*place).integers(1 << 60)) for place in places]
