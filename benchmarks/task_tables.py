r"""The tables of the tasks, from their run records."""

from collections.abc import Sequence

import pandas as pd
from records import RECORDS, record_of
from study_tables import markdown_rows


def _read(name: str) -> pd.DataFrame:
    return pd.DataFrame(record_of(RECORDS / f"{name}.json")["results"]["table"])


def _cell(values: Sequence[float], form: str) -> str:
    return " / ".join(format(value, form) for value in values)


def _nats(value: float) -> str:
    # The mean of an exponential may be anything.
    return f"{value:.2f}" if abs(value) < 1e6 else f"{value:.1e}"


def planar() -> str:
    r"""Returns total mass and divergence on the planar sets, solver rows by NFE."""
    frame = _read("density_planar")
    header = ["set", "entropy"]
    columns = {
        "OS-DRE (likelihood)": ("OS-DRE, likelihood", True),
        "OS-DRE (path difference)": ("OS-DRE, path", True),
        "DRE-∞": ("DRE-∞", False),
        "D³RE": ("D³RE", False),
        "Direct (likelihood)": ("Direct, likelihood", False),
    }
    for title, mass in columns.values():
        header += [f"{title}: log Ẑ", "KL"] if mass else [f"{title}: KL"]
    rows = []
    for name, group in frame.groupby("set", sort=False):
        row = [str(name), f"{group['entropy'].iloc[0]:.3f}"]
        for method, (_, mass) in columns.items():
            own = group[group["method"] == method].sort_values("evaluations")
            if mass:
                row.append(f"{own['log_mass'].iloc[0]:+.3f}")
            row.append(_cell(own["kl"].tolist(), ".3f" if len(own) == 1 else ".2f"))
        rows.append(row)
    return markdown_rows(header, rows)


def tabular() -> str:
    r"""Returns likelihoods of tables before and after division by the mass, with its estimates."""
    names = ("density_tabular_whitened", "density_tabular")
    frame = pd.concat([_read(name) for name in names])
    # By table, as in the records; within one, the whitened reference first.
    order = {name: i for i, name in enumerate(frame["table"].unique())}
    frame = frame.sort_values("table", key=lambda names: names.map(order), kind="stable")
    rows = [
        [
            f"{row['table']} (d = {row['dim']:.0f})",
            row["p0"],
            row["method"] if row["kernel"] == "-" else f"{row['method']}, {row['kernel']}",
            f"{row['evaluations']:.0f}",
            f"{row['nll']:.2f}",
            _with_error(row["log_mass"], row["log_mass_error"]),
            "-" if pd.isna(row["effective"]) else f"{row['effective']:.0f}",
            _with_error(row["log_mass_ais"], row["log_mass_ais_error"]),
            f"{row['normalised_nll']:.2f}",
            f"{row['train_seconds']:.0f}",
        ]
        for row in frame.to_dict("records")
    ]
    header = ["table", "p0", "method", "NFE", "NLL, as it comes", "log Ẑ", "draws"]
    return markdown_rows([*header, "log Ẑ, annealed", "normalised NLL", "seconds"], rows)


def _with_error(value: float, error: float) -> str:
    return "-" if pd.isna(value) else f"{value:.2f} ± {error:.2f}"


def images() -> str:
    r"""Returns bits per dimension of images, before and after division by the mass."""
    rows = []
    for row in _read("density_images").to_dict("records"):
        error = row["log_mass_error"]
        mass = f"{row['log_mass']:.1f}" + ("" if pd.isna(error) else f" ± {error:.1f}")
        rows.append(
            [
                f"{row['images']} (d = {row['dim']})",
                "covariance alone" if row["method"] == "Gaussian" else row["method"],
                f"{row['bits']:.3f}",
                mass,
                f"{row['normalised_bits']:.3f}",
            ]
        )
    return markdown_rows(
        ["images", "row", "bits, as it comes", "log Ẑ (nats)", "normalised"], rows
    )


def divergences(name: str) -> str:
    r"""Returns the divergences of the streams, truth first."""
    return _pivot(_read(name), ["task", "step"])


def lags(name: str) -> str:
    r"""Returns how many steps of a stream each method was in time for, and its mean lag.

    Of all steps but the first, where nothing has moved yet. A step that it was not in time for
    counts as one.
    """
    frame = _read(name)
    frame = frame[frame["step"] > 0]
    frame = frame.assign(method=_titles(frame))
    rows = []
    for method, group in frame.groupby("method", sort=False):
        cells = []
        for _, own in group.groupby("task", sort=False):
            lag = own["lag"].clip(upper=1).fillna(1).mean()
            cells.append(f"{(own['lag'] <= 1).sum()} of {len(own)}, {lag:.2f}")
        rows.append([str(method), *cells])
    return markdown_rows(["method", *frame["task"].unique()], rows)


def drift() -> str:
    r"""Returns the alarms of the drift monitor."""
    frame = _read("drift")
    formats = {"E_q[log r]": "{:.2f}", "truth": "{:.2f}"}
    rows = [
        [formats.get(k, "{:g}").format(v) if pd.notna(v) else "-" for k, v in row.items()]
        for row in frame.to_dict("records")
    ]
    return markdown_rows(list(frame.columns), rows)


def information(*names: str) -> str:
    r"""Returns estimates of mutual information with their errors, one row a method and task."""
    frame = pd.concat([_read(name) for name in names])
    frame = frame.fillna({"kernel": "-", "features": "-"})
    rows = [
        [
            row["task"],
            row["method"] if row["kernel"] == "-" else f"{row['method']}, {row['kernel']}",
            str(row["evaluations"]),
            f"{row['truth']:.2f}",
            str(row["seeds"]),
            _nats(row["mean"]) + (f" ± {_nats(row['std'])}" if pd.notna(row["std"]) else ""),
            f"{row['mse']:.3g}" if row["seeds"] > 1 else "-",
            _percent(row["relative"]),
            f"{row['seconds']:.0f}",
        ]
        for row in frame.to_dict("records")
    ]
    header = ["task", "method", "NFE", "truth", "seeds", "mean", "MSE", "error", "seconds"]
    return markdown_rows(header, rows)


def _percent(share: float) -> str:
    if pd.isna(share):
        return "-"
    return f"{100 * share:+.1f} %" if abs(share) < 1e4 else f"{100 * share:+.0e} %"


def benchmark_tasks() -> str:
    r"""Returns the estimates on `benchmark-mi`'s tasks, those that fall short most first."""
    frame = _read("bmi").sort_values("error", kind="stable")
    rows = [
        [
            row["task"],
            row["dims"],
            f"{row['truth']:.2f}",
            f"{row['estimate']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            "-" if pd.isna(row["ksg"]) else f"{row['ksg']:.2f}",
        ]
        for row in frame.to_dict("records")
    ]
    return markdown_rows(["task", "dimensions", "truth", "estimate", "interval", "KSG"], rows)


def pathological() -> str:
    r"""Returns the estimates on pathological pairs, truth first, one column a method."""
    return _pivot(_read("mi_pathological"), ["task"])


def pathological_errors() -> str:
    r"""Returns mean absolute and mean squared errors over all pathological pairs, by method."""
    frame = _read("mi_pathological")
    if "mse" not in frame:  # of one seed
        frame["mse"] = frame["mae"] ** 2
    errors = frame.groupby(_titles(frame), sort=False)[["mae", "mse"]].mean()
    rows = [
        [str(title), f"{row['mae']:.3f}", f"{row['mse']:.2g}"] for title, row in errors.iterrows()
    ]
    return markdown_rows(["method", "MAE", "MSE"], rows)


def _titles(frame: pd.DataFrame) -> pd.Series:
    r"""Returns methods with their kernel, where there are several, and NFE, where it is not 1."""
    titles = frame["method"]
    if "kernel" in frame:
        several = frame.groupby("method")["kernel"].transform("nunique") > 1
        titles = titles.where(~several, titles + ", " + frame["kernel"])
    solver = frame["evaluations"] > 1
    return titles.where(~solver, titles + ", NFE " + frame["evaluations"].map(str))


def _pivot(frame: pd.DataFrame, keys: list[str]) -> str:
    titles = _titles(frame)
    frame = frame.assign(method=titles)
    methods = list(dict.fromkeys(titles))
    rows = []
    for key, group in frame.groupby(keys, sort=False):
        means = group.set_index("method")["mean"]
        cells = [_nats(means[m]) if m in means.index else "-" for m in methods]
        rows.append([*(str(k) for k in key), f"{group['truth'].iloc[0]:.2f}", *cells])
    return markdown_rows([*keys, "truth", *methods], rows)
