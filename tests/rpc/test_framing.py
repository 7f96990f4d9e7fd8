"""However the bytes arrive, the same pieces come out."""

from hypothesis import given
from hypothesis import strategies as st

from drover.rpc.framing import Inbox


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_any_chunking_gives_the_same_pieces(sizes: list[int], random: object) -> None:
    stream = bytes(i % 251 for i in range(sum(sizes)))
    inbox, sent, taken = Inbox(capacity=64), 0, b""
    for turn, size in enumerate(sizes):
        target = bytearray(size)
        landing = turn % 2 == 1
        if landing:
            inbox.land(memoryview(target))
        while True:
            if landing and inbox.landed():
                piece = bytes(target)
                break
            if not landing and (taken_now := inbox.take(size)) is not None:
                piece = taken_now
                break
            room = inbox.room()
            assert len(room) > 0
            count = min(len(room), len(stream) - sent, random.randint(1, 40))  # type: ignore[attr-defined]
            room[:count] = stream[sent : sent + count]
            inbox.filled(count)
            sent += count
        taken += piece
    assert taken == stream
    assert inbox.pending == sent - len(taken)


def test_an_empty_body_has_landed_at_once() -> None:
    inbox = Inbox()
    inbox.land(memoryview(bytearray()))
    assert inbox.landed()
    assert len(inbox.room()) > 0
