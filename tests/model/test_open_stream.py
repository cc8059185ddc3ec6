"""An open stream: when hidden frames are deleted, and that a batch counts like single frames."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from flowfabric.model.errors import EngineError, InvalidInputError
from flowfabric.model.open_stream import MAX_TRIMMED, NEW_STREAM, TRIM_STEP, OpenStream, Summary
from flowfabric.model.stream import BestEffortLive, BestEffortLiveConfig, Durable, DurableSummary, Frame, StreamMode
from flowfabric.model.summary import MAX_SUMMARY_BYTES, encode_document

SUMMARY = DurableSummary()


def live(**config: Any) -> BestEffortLive:
    return BestEffortLive(config=BestEffortLiveConfig(**{"ttl_ms": 1_000, **config}))


class Stored:
    """A stream and its frames as a store keeps them."""

    def __init__(self, *, maxlen: int) -> None:
        self.maxlen = maxlen
        self.now = 1
        self.row: Mapping[str, Any] = NEW_STREAM
        self.frames: list[int] = []
        self.sweeps = [2**40]
        """The times at which the sweep was to look, the current one last."""
        self.summary = Summary({}, 0, 0)

    def append(self, *modes: StreamMode, ms: int = 1) -> None:
        """Append frames of these modes in one transaction."""
        self.now += ms
        stream = OpenStream(now=self.now, retention_maxlen=self.maxlen, stored=self.row)
        stream.summary = self.summary
        for mode in modes:
            stream.append(Frame(bytes=b"{}", mode=mode))
        looked_at, rest = self.frames[: stream.trim_limit], self.frames[stream.trim_limit :]
        self.frames = [number for number in looked_at if number >= stream.first_frame_no] + rest
        self.frames += [frame.number for frame in stream.new_frames]
        if (sweep_at := stream.sweep_at) is not None:
            self.sweeps.append(sweep_at)
        row = {name: getattr(stream, name) for name in OpenStream.__slots__ if not name.startswith("_")}
        self.row = {**row, "last_ms": stream.last.ms, "last_seq": stream.last.seq, "sweep_at": self.sweeps[-1]}

    @property
    def visible(self) -> list[int]:
        return [number for number in self.frames if number >= self.row["first_frame_no"]]


@pytest.mark.parametrize("batch", [1, 3, 100, 500])
def test_the_newest_frames_are_visible_and_few_hidden_ones_are_kept(batch: int) -> None:
    stored = Stored(maxlen=300)
    for _ in range(3_000 // batch):
        stored.append(*[Durable()] * batch)
        count = stored.row["frame_count"]
        assert stored.visible == [*range(max(1, count - 299), count + 1)]
        assert len(stored.frames) < 300 + TRIM_STEP + batch


def test_many_frames_that_are_hidden_at_once_are_deleted_over_several_appends() -> None:
    stored = Stored(maxlen=20_000)
    for _ in range(40):
        stored.append(*[Durable()] * 500)
    assert len(stored.frames) == 20_000
    stored.append(SUMMARY)
    assert len(stored.visible) == 64
    assert len(stored.frames) == 20_001 - MAX_TRIMMED
    # The sweep deletes the rest even if nothing is appended; until then, no append changes its time.
    stored.append(*[live(ttl_ms=60_000)] * 500, SUMMARY)
    assert stored.sweeps[1:] == [stored.now - 1]
    for _ in range(20_000):
        stored.append(live(maxlen_floor=10, maxlen_ceiling=10))
        if len(stored.frames) < 10 + TRIM_STEP:
            break
    assert len(stored.frames) < 10 + TRIM_STEP
    assert len(stored.visible) == 10


@pytest.mark.parametrize(("ttl_ms", "step_ms"), [(1_000, 1_000), (60_000, 15_000)])
def test_the_time_of_the_sweep_follows_the_expiry_in_steps(ttl_ms: int, step_ms: int) -> None:
    stored = Stored(maxlen=1_000)
    for _ in range(600):
        stored.append(live(ttl_ms=ttl_ms), ms=100)
        assert 0 <= stored.row["expires_at"] - stored.sweeps[-1] < step_ms
    assert len(stored.sweeps) - 2 == 59_900 // step_ms
    # A shorter ttl makes it due earlier.
    stored.append(live(ttl_ms=100), ms=100)
    assert stored.sweeps[-1] - stored.now - 200 < 1_000


def test_a_batch_counts_like_single_frames() -> None:
    rng = random.Random(1)
    modes: list[StreamMode] = [Durable(), SUMMARY, live(), live(maxlen_floor=5, maxlen_ceiling=5)]
    for _ in range(50):
        chosen = rng.choices(modes, k=40)
        together, single = Stored(maxlen=20), Stored(maxlen=20)
        together.append(*chosen, ms=1)
        for at, mode in enumerate(chosen):
            single.append(mode, ms=1 if at == 0 else 0)
        varying = {"summary": None, "sweep_at": None}
        assert {**together.row, **varying} == {**single.row, **varying}
        assert together.visible == single.visible
        assert together.summary.version == single.summary.version == chosen.count(SUMMARY)


def test_a_patch_that_makes_the_summary_too_large_changes_nothing() -> None:
    stream = OpenStream(now=5, retention_maxlen=10)
    stream.summary = Summary({}, 0, 0)
    text = "x" * 60_000
    for nth in range(17):
        stream.append(Frame(bytes=json.dumps({f"{nth:02}": text}).encode(), mode=SUMMARY))
    size = len(encode_document(stream.summary.document))
    # The key, four quotes, a colon and a comma.
    room = MAX_SUMMARY_BYTES - size - 8
    with pytest.raises(EngineError, match=r"retention_limit_exceeded: .* 1048577 bytes; at most 1048576 bytes"):
        stream.append(Frame(bytes=json.dumps({"17": "x" * (room + 1)}).encode(), mode=SUMMARY))
    assert (stream.frame_count, stream.summary.version, len(stream.new_frames)) == (17, 17, 17)
    assert len(encode_document(stream.summary.document)) == size
    stream.append(Frame(bytes=json.dumps({"17": "x" * room}).encode(), mode=SUMMARY))
    assert len(encode_document(stream.summary.document)) == MAX_SUMMARY_BYTES
    # Replacing and deleting make room.
    stream.append(Frame(bytes=json.dumps({"00": None, "18": text}).encode(), mode=SUMMARY))
    assert stream.summary.version == 19


def test_a_refused_patch_changes_nothing() -> None:
    stream = OpenStream(now=5, retention_maxlen=10)
    stream.summary = Summary({"a": 1}, 3, 1)
    with pytest.raises(InvalidInputError, match="must be a JSON object"):
        stream.append(Frame(bytes=b"[]", mode=SUMMARY))
    assert (stream.frame_count, stream.has_grown, stream.summary.version, stream.summary.is_changed) == (
        0,
        False,
        3,
        False,
    )
