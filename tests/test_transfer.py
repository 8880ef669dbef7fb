r"""What is made of several studies' lines: a study at equal seconds, and how families are ordered."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from scipy import stats
from sklearn.metrics import roc_auc_score

from ood_osdre.evaluation.scores import Scores, write_scores

if TYPE_CHECKING:
    from records import Run

pytestmark = pytest.mark.usefixtures("benchmarks")


def run_of(method: str, seed: int, near: float, **changes: object) -> "Run":
    from records import Run

    values: dict[str, Any] = {
        "method": method, "seed": seed, "id": "cifar10", "benchmark": "openood_subset",
        "reference": "tiny_reference", "config": {}, "commit": None, "checksums": {}, "device": None,
        "train_seconds": 1.0, "score_seconds": 3.0, "parameters": 7, "validation": {},
        "metrics": {"nearood": {"AUROC": near}, "farood": {"AUROC": near}},
    }  # fmt: skip
    return Run.of({**values, **changes}, "test")


STUDY = """
question: Which?
protocol: None.
config: digits_representation
ids: [digits]
benchmarks: [digits]
seeds: [0]
curve: true
shared: {few: &few [[head.rank=4]]}
methods:
  fast: {options: *few}
  slow: {options: [*few, head.width=32], variant: NFE 10, variants: {NFE 2: [evaluation.evaluations=2]}}
  default: {}
"""


def test_methods_at_equal_seconds_take_steps_at_their_own_pace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import equal_seconds
    from jobs import config_of, plan
    from records import write_runs
    from studies import load_study

    (tmp_path / "s.yml").write_text(STUDY)
    command = ["s", "--studies", str(tmp_path), "--records", str(tmp_path)]
    assert equal_seconds.main(command) == 2
    assert "fast: no record says how long its head trained" in capsys.readouterr().err
    timed = {"fast": (30.0, 33.0), "slow": (60.0, 75.0), "default": (7.5, 7.5)}
    runs = [
        run_of(
            name, i, 50.0, validation={"step": 300, "seconds": seconds},
            config={"head": {"training": {"steps": 300}}}, variant="NFE 10" * (name == "slow"),
        )
        for name, both in timed.items() for i, seconds in enumerate(both)
    ]  # fmt: skip
    write_runs(tmp_path / "s.jsonl", runs)
    # As long as the first method takes: the fastest of its runs, 30 seconds.
    for further, expected in (([], [300, 150, 1200]), (["--seconds", "60"], [600, 300, 2400])):
        assert equal_seconds.main([*command, *further]) == 0
        study = load_study("s_seconds", tmp_path)
        jobs = plan(study, list(study.methods), None, tmp_path)
        heads = [config_of(job)["head"] for job in jobs]
        assert [head["training"]["steps"] for head in heads] == expected
        assert [head["training"]["warmup"] for head in heads] == [n // 20 for n in expected]
        assert [head["rank"] for head in heads] == [4, 4, 16]
        assert study.methods["slow"].variants.keys() == {"NFE 2"}
    assert "study s, but that each head trains for 60 seconds" in study.protocol
    assert "shared" not in yaml.safe_load((tmp_path / "s_seconds.yml").read_text())


def scores_of(shift: float) -> Scores:
    rng, scores = np.random.default_rng(0), Scores()
    for role, name, mean in (("id", "test", shift), ("near", "n", 0.3), ("far", "f", -1.0)):
        value = rng.normal(mean, 1, 80).round(1)  # with ties
        scores.add(role, name, value, np.zeros(80, int), [f"{i}" for i in range(80)])
    return scores


def test_replicates_of_images_are_those_of_scikit_learn() -> None:
    import transfer

    scores = scores_of(0.5)
    found = transfer.image_aurocs(scores, ["n", "f"], 40)
    assert list(found) == ["n", "f"]
    (ids,), (near,) = scores.of("id").values(), scores.of("near").values()
    both, truth = np.concatenate([ids.score, near.score]), np.repeat([1, 0], 80)
    assert found["n"][0] == pytest.approx(100 * roc_auc_score(truth, both))
    weights = [transfer._weights(name, 80, 40)[7] for name in ("test", "n")]
    expected = 100 * roc_auc_score(truth, both, sample_weight=np.concatenate(weights))
    assert found["n"][7] == pytest.approx(expected)
    # Of 80 images a side the deviation is about that of Hanley and McNeil.
    assert 2 < found["n"][1:].std() < 8


def test_families_are_paired_and_ordered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_tables
    import figures
    import transfer
    from records import record_of, write_runs
    from studies import slug

    command = ["--records", str(tmp_path), "--runs", str(tmp_path), "--out", str(tmp_path)]
    command += ["--replicates", "50"]
    assert transfer.main(command) == 2
    assert (
        "no three families have lines in the main and a mirrored study" in capsys.readouterr().err
    )
    blind = {"config": {"estimator": "classifier", "head": None}, "reference": "tin_reference"}
    main, mirror, heads = [], [], []
    mirrored = {"id": "mirror", "reference": "reference_mixed"}
    for seed in (0, 1):
        main += [
            run_of("OS-DRE, pixels", seed, 94.0 + seed, validation={"val_auroc": 0.9}),
            run_of("OS-DRE, pixels", seed, 50.0, reference="tin_reference"),
            run_of(
                "OS-DRE, representation, conditional", seed, 90.0, validation={"val_auroc": 0.8}
            ),
            run_of("outlier exposure", seed, 92.0, validation={"val_auroc": 0.95}),
            run_of("classifier, softmax", seed, 85.0, **blind, validation={"val_auroc": 0.7}),
            run_of("classifier, softmax", seed, 86.0, **blind, variant="energy"),
            run_of("without its like", seed, 99.0),
        ]
        for draw in ("mirror0", "mirror1"):
            place = {**mirrored, "benchmark": draw}
            mirror += [
                run_of("OS-DRE, end-point", seed, 80.0 + 2 * (draw == "mirror1"), **place),
                run_of("outlier exposure", seed, 75.0, **place),
                run_of("classifier, softmax", seed, 60.0, **{**blind, "benchmark": draw}),
                run_of(
                    "classifier, softmax",
                    seed,
                    59.0,
                    **{**blind, "benchmark": draw},
                    variant="energy",
                ),
            ]
            heads.append(run_of("conditional", seed, 77.0, **place))
    for name, runs in (("main", main), ("mirror_pixels", mirror), ("mirror_heads", heads)):
        write_runs(tmp_path / f"{name}.jsonl", runs)
    for run in main:
        kept = tmp_path / "main" / f"cifar10-openood_subset-{run.reference}" / slug(run.method)
        # The scores of one seed are enough, whichever it is.
        kept = kept / ("seed-1" if run.method == "outlier exposure" else "seed-0") / run.variant
        kept.mkdir(parents=True, exist_ok=True)
        shift = 0.5 if run.method == "OS-DRE, pixels" else 9.0
        write_scores(kept / "scores.npz", scores_of(shift))
    assert transfer.main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("cifar10, tiny_reference\n")
    rows = {row.split(" | ")[0]: row.split(" | ")[1:] for row in text.splitlines() if "|" in row}
    assert list(rows)[2:-1] == [
        "| OS-DRE, pixels", "| outlier exposure", "| OS-DRE, representation, conditional",
        "| classifier, softmax, energy", "| classifier, softmax",
    ]  # fmt: skip
    # Its seeds have one number: an interval without a length would look like certainty.
    assert rows["| OS-DRE, pixels"][0] == "81.0"
    low, high = map(float, rows["| OS-DRE, pixels"][2].split("[")[1].strip("] |").split(", "))
    # Wider than seeds alone make it, 94 to 95.
    assert low < 93
    assert high > 96
    assert rows["| classifier, softmax, energy"][1] == "-"
    test, mirror_means, validation = [94.5, 92, 90, 86, 85], [81, 75, 77, 59, 60], [90, 95, 80, 70]
    for i, (x, y) in enumerate(((mirror_means, test), (validation, [*test[:3], 85]))):
        rho = stats.spearmanr(x, y).statistic
        assert rows["| Spearman's rho with test"][i].startswith(f"{rho:.2f} [")
    results = record_of(tmp_path / "transfer.json")["results"]
    assert text == f"{bench_tables.transfer(results)}\n"
    monkeypatch.setattr(figures, "RECORDS", tmp_path)
    figures.transfer(tmp_path / "transfer.png")
    assert (tmp_path / "transfer.png").stat().st_size > 10_000
