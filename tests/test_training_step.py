r"""The benchmark of a training step: both loops take the same step, and the record says what it cost."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("benchmarks")

SMALL = ["--width", "0.125", "--batch-size", "8", "--images", "24", "--pairs", "2"]


@pytest.fixture(autouse=True)
def _single_precision() -> None:
    torch.set_default_dtype(torch.float32)


def test_both_loops_have_the_same_loss_and_the_same_images() -> None:
    import training_step

    args = training_step.parser().parse_args(SMALL)
    bench = training_step.Bench(training_step.configured(args), 24, torch.device("cpu"))
    ratio = bench.trainer.ratio.train()
    nn.init.normal_(ratio.network.head.weight)
    head = {f"head.{k}": v for k, v in ratio.fold().head.state_dict().items()}
    bench.net.load_state_dict({**ratio.network.state_dict(), **head})
    batch = bench.batches(0)
    ours = bench.trainer.losses(batch)["total"].mean()
    bare = bench.loss(torch.cat([batch.x_0, batch.x_1]), batch.label)
    assert ours > 1
    torch.testing.assert_close(ours, bare)

    # Of the bare loop: every image is a crop of its own, mirrored where it is said to be.
    chosen, flips = torch.arange(24), torch.arange(24) % 2 == 0
    x = bench._augmented(bench.padded[0], chosen, flips)
    padded = bench.padded[0].permute(0, 3, 1, 2).float() / 255
    for one, whole, flip in zip(x, padded, flips, strict=True):
        one = one.flip(2) if flip else one
        crops = [whole[:, i : i + 32, j : j + 32] for i in range(5) for j in range(5)]
        assert any(torch.equal(one, crop) for crop in crops)


def test_the_loops_learn_and_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import training_step

    steps = {"ours": 0, "bare": 0}
    benches = []

    class Counted(training_step.Bench):
        def ours(self) -> None:
            benches.append(self)
            steps["ours"] += 1
            super().ours()

        def bare(self) -> None:
            steps["bare"] += 1
            super().bare()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "Bench", Counted)
        assert training_step.main([*SMALL, "--out", str(tmp_path)]) == 0
    pairs = 2 + 3  # with those that do not count
    assert steps == {"ours": 1 + pairs, "bare": 3 * pairs}
    for net in (benches[0].trainer.ratio, benches[0].net):
        start = training_step.Bench(benches[0].config, 24, torch.device("cpu")).net.backbone
        (backbone,) = (m for m in net.modules() if type(m) is type(start))
        weight = "groups.0.0.weight"
        assert not torch.equal(backbone.state_dict()[weight], start.state_dict()[weight])

    record = json.loads((tmp_path / "run.json").read_text())
    assert record["config"]["training_step"] == {"images": 24, "pairs": 2, "amp": "none"}
    results = record["results"]
    assert list(results) == ["A/A control: bare loop", "training step"]
    assert all(0 < low <= m <= high for m, low, high in results.values())
    assert "| over the bare loop's |" in capsys.readouterr().out
