"""The phases of a coordinator and how far loading is."""

from drover.coordinator.lifecycle import Lifecycle


def test_from_loading_to_stopping() -> None:
    life = Lifecycle()
    assert (life.phase, life.progress) == ("loading", {})
    assert "the workers are being reached" in (life.why_not_ready() or "")
    life.begin_loading({"a": 2048, "b": 1024})
    life.advance("a", 512)
    life.advance("a", 512)
    assert life.progress == {"a": (1024, 2048), "b": (0, 1024)}
    assert life.why_not_ready() == "the model is being loaded: 1.0 KiB of 3.0 KiB are in place; try again later"
    life.ready()
    assert (life.phase, life.why_not_ready()) == ("ready", None)
    life.stopping()
    life.ready()
    assert (life.phase, life.why_not_ready()) == ("stopping", "the coordinator is stopping")
