r"""Exports the folded scorer, preprocessing inside, to a file that needs none of this package.

    ood-osdre export RUN FILE.onnx
    ood-osdre export RUN FILE.pt2 --inputs FOLDER --tolerance 1e-3

The file maps uint8 images `images`, with shape (B, S, S, 3) and any B, to `log_ratio`, with shape
(B), in nats (larger = more ID), and, if the network has a class head, to `logits`. Of a detector of
vectors the inputs are `vectors`, float64 with shape (B, d), so that coordinates such as times keep
their digits. Of a run that sums parts the output is `score`, without a unit. Of a detector that is
calibrated, the command adds `p_value`, with `--p-value`, and `decision`, +1 for ID and -1 for OOD,
with `--threshold`, each with shape (B): those of the detector at this log-ratio.

Before the file is written, each output is compared with the original, on inputs of yours (a folder
of images, a list file or a .npy array) or on synthetic ones with the means and deviations of the ID
data: the largest difference may be 1e-4 of the output's spread over them, or ten times what the
original differs by from itself in double precision, but never more than 0.1: far from what it
was trained on, a network may lose most of its digits. A `.pt2` file is a program
for :func:`torch.export.load`; an `.onnx` file runs wherever ONNX does, and making one needs the
packages of the extra `export`. A detector with a backbone of your own is exported in Python:
`export_scorer(load_scorer(folder, backbone=...), path)`.
"""

__all__ = ["RESIZING", "DeployedScorer", "export_scorer"]

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data.inputs import read
from .data.transforms import Preprocess
from .detectors import Scorer
from .errors import UserError, one_line
from .files import atomic_path, local
from .models import FoldedRatio, Prediction, RatioModel, RepresentationRatio, SummedScore, copied
from .training.surroundings import own_surroundings

#: How images are brought to the size that a file takes.
RESIZING = (
    "RGB, the shorter side resized to {} pixels by Pillow's bilinear filter, then the central crop"
)
# The largest difference from the original, as a share of an output's standard deviation.
TOLERANCE = 1e-4
SAMPLES = 64
# The least spread, as a share of the largest output; and the scales of synthetic images, by halves.
FLAT, SCALES = 0.01, 6
# Of a network that loses more digits itself, a file may lose ten times as many, up to a limit.
ROUNDINGS, MOST = 10.0, 1000.0
# What writes an ONNX file and runs it.
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class DeployedScorer(nn.Module):
    r"""A scorer as one module, from stored images or vectors to log-ratios.

    Arguments:
        scorer: The trained scorer.
        extras: What else of a calibrated scorer is put out: `p_value`, `decision`.
    """

    calibration: Tensor

    def __init__(self, scorer: Scorer, extras: Sequence[str] = ()) -> None:
        super().__init__()
        self.extras = extras
        if extras:
            assert scorer.conformal is not None
            self.threshold = scorer.conformal.threshold
            self.register_buffer("calibration", torch.as_tensor(scorer.conformal.scores))
        self.model = copied(scorer.ratio).cpu().eval()
        self.mean: Tensor
        self.std: Tensor
        self.takes_images = isinstance(scorer.preprocess, Preprocess)
        for name, value in zip(("mean", "std"), scorer.preprocess.statistics, strict=True):
            own = value.float()[:, None, None] if self.takes_images else value
            self.register_buffer(name, own)

    def forward(self, inputs: Tensor) -> tuple[Tensor, ...]:
        r"""Returns the log-ratios, :math:`(B)`, the class logits if there are any, and the extras.

        Arguments:
            inputs: The uint8 images, with shape :math:`(B, H, W, 3)`, or vectors in double
                precision, with shape :math:`(B, d)`.
        """
        if self.takes_images:
            inputs = inputs.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        outputs = _as_tuple(self.model.predict(((inputs - self.mean) / self.std).float()))
        score, more = outputs[0].double(), []
        if "p_value" in self.extras:
            below = (self.calibration <= score[:, None]).sum(dim=1)
            more.append((1 + below).double() / (1 + len(self.calibration)))
        if "decision" in self.extras:
            more.append(2 * (score >= self.threshold).long() - 1)  # NaN is no ID
        return (*outputs, *more)


@own_surroundings()
def export_scorer(
    scorer: Scorer,
    path: str | os.PathLike[str],
    inputs: object = None,
    tolerance: float = TOLERANCE,
    extras: Sequence[str] = (),
) -> float:
    r"""Writes a scorer as a `.pt2` or an `.onnx` file.

    Arguments:
        scorer: The trained scorer.
        path: The file to write.
        inputs: Images or vectors to compare both on, at least two, in any of the forms of
            :mod:`ood_osdre.data.inputs`; None for synthetic ones.
        tolerance: The largest difference, as a share of an output's spread; a network that rounds
            more itself may have up to a thousand times as much.
        extras: What else of a calibrated scorer to put into the file: `p_value`, `decision`, in this
            order.

    Returns:
        The largest difference of a log-ratio or logit from the original's, as a share of their
        spread over the inputs: their standard deviation, or a hundredth of the largest of them where
        they hardly vary.

    Raises:
        UserError: If the suffix is another one, a package is missing, the scorer is no ratio or
            integrates over time, is not calibrated where that is needed, the network cannot be exported, the inputs are not like those of
            training, or the file disagrees with the original.
    """
    path, writers = local(path), {".pt2": _write_program, ".onnx": _write_onnx}
    missing = [p for p in PACKAGES if path.suffix == ".onnx" and find_spec(p) is None]
    if path.suffix not in writers or missing:
        problem = f"got the suffix {path.suffix!r}, expected .onnx or .pt2"
        if missing:
            problem = "an .onnx file needs the packages of the extra 'export': pip install "
        raise UserError(f"{path}: {problem}{' '.join(missing)}.")
    for ratio in _networks(scorer.ratio):
        inner = ratio.ratio if isinstance(ratio, RepresentationRatio) else ratio
        if not isinstance(inner, FoldedRatio):
            raise UserError(
                f"{path}: got a {type(inner).__name__}, only one-step and direct ratios can be "
                "exported."
            )
    x = _synthetic(scorer) if inputs is None else _given(scorer, inputs)
    if extras and scorer.conformal is None:
        raise UserError(f"{path}: the scorer is not calibrated, so it has no {extras[0]}.")
    # Of the scorer, not of the module: its preprocessing is to be right, too.
    expected = _outputs(scorer, x)
    module = DeployedScorer(scorer, extras).eval()
    with atomic_path(path) as temporary:
        try:
            run = writers[path.suffix](module, x, temporary)
        except OSError:
            raise
        except Exception as error:  # of the exporter's many
            raise UserError(
                f"{path}: PyTorch cannot export the network ({one_line(error, 120)}); of a "
                "TorchScript backbone, pass the module that it was made of to load_scorer."
            ) from error
        # One at a time as well as together: the batch is free.
        found = [torch.cat(parts) for parts in zip(run(x[:1]), run(x[1:]), strict=True)]
        differences = [_difference(a, b) for a, b in zip(found, expected, strict=False)]
        rounding = _rounding(scorer, x, expected)
        compared = zip(_names(scorer.ratio), differences, rounding, strict=False)
        for name, difference, own in compared:
            if not difference <= min(max(tolerance, ROUNDINGS * own), MOST * tolerance):
                raise UserError(
                    f"{path}: exported and original {name} differ by {difference:.1e} of their "
                    f"spread over {len(x)} {'synthetic' if inputs is None else 'given'} inputs, "
                    f"expected at most {tolerance:g}; nothing was written."
                )
        _check_extras(scorer, path, found, extras)
    return max(differences)


def _check_extras(
    scorer: Scorer, path: Path, found: Sequence[Tensor], extras: Sequence[str]
) -> None:
    r"""Refuses a file whose p-values or decisions are not the scorer's at its own log-ratios."""
    if (conformal := scorer.conformal) is None:
        return
    scores = found[0].numpy()
    known = {
        "p_value": conformal.pvalue(scores),
        "decision": np.where(conformal.flagged(scores), -1, 1),
    }
    for name, values in zip(extras, found[len(found) - len(extras) :], strict=True):
        if not np.array_equal(values.numpy(), known[name]):
            raise UserError(f"{path}: exported and original {name} differ; nothing was written.")


def _difference(found: Tensor, expected: Tensor) -> float:
    # Single precision resolves 1e-7 of a number, whatever the spread of several.
    spread = max(float(expected.std()), FLAT * float(expected.abs().max()))
    gap = float((found - expected).abs().max())
    return gap / spread if gap else 0.0


@torch.no_grad()
def _rounding(scorer: Scorer, x: Tensor, expected: Sequence[Tensor]) -> list[float]:
    r"""Returns the difference of each output from its own value in double precision."""
    exact = replace(scorer, ratio=copied(scorer.ratio).double())
    try:
        outputs = _as_tuple(exact.ratio.predict(exact.preprocess(x).double()))
    except (RuntimeError, TypeError, ValueError):  # of networks that know one precision alone
        return [0.0 for _ in expected]
    return [_difference(a, b.cpu()) for a, b in zip(expected, outputs, strict=True)]


def _given(scorer: Scorer, inputs: object) -> Tensor:
    r"""Returns inputs of the user's as the scorer stores them."""
    values = read(inputs, scorer.metadata["size"], "inputs").values
    if values.shape[1:] != scorer.shape or len(values) < 2:
        raise UserError(
            f"inputs: got shape {values.shape}, expected two or more of shape {scorer.shape}."
        )
    x = torch.as_tensor(np.ascontiguousarray(values))
    return x.double() if x.is_floating_point() else x


def _synthetic(scorer: Scorer) -> Tensor:
    r"""Returns inputs with the means and deviations of the ID data, images smooth and less smooth.

    Noise in all pixels would not do: to a network it is always the same picture, whose scores vary
    by rounding.
    """
    generator = torch.Generator().manual_seed(0)
    mean, std = scorer.preprocess.statistics
    if not isinstance(scorer.preprocess, Preprocess):
        return mean + std * torch.randn(SAMPLES, len(mean), generator=generator, dtype=mean.dtype)
    size = scorer.metadata["size"]
    cells = [max(1, size >> i % SCALES) for i in range(SAMPLES)]
    draws = (torch.randn(1, len(mean), side, side, generator=generator) for side in cells)
    fields = torch.cat([F.interpolate(x, (size, size), mode="bilinear") for x in draws])
    pixels = 255 * (mean + std * fields.permute(0, 2, 3, 1))
    return pixels.clamp(0, 255).round().to(torch.uint8)


def _networks(model: nn.Module) -> list[nn.Module]:
    return [*model.networks] if isinstance(model, SummedScore) else [model]


def _names(model: RatioModel) -> tuple[str, str]:
    r"""Returns the names of the outputs; a score that is no log-ratio is not called one."""
    return ("log_ratio" if model.in_nats else "score", "logits")


@torch.no_grad()
def _outputs(scorer: Scorer, images: Tensor) -> tuple[Tensor, ...]:
    prediction = scorer.ratio.predict(scorer.preprocess(images))
    return tuple(output.cpu() for output in _as_tuple(prediction))


def _as_tuple(prediction: Prediction) -> tuple[Tensor, ...]:
    logits = () if prediction.logits is None else (prediction.logits,)
    return prediction.score, *logits


Run = Callable[[Tensor], Sequence[Tensor]]


def _write_program(module: DeployedScorer, images: Tensor, path: Path) -> Run:
    program = torch.export.export(module, (images,), dynamic_shapes=({0: _batch()},))
    # Torch's own writer ends the process where the disk is full.
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Of torch's own bookkeeping: views of one storage are found to have no whole owner.
        warnings.filterwarnings("ignore", "No complete tensor found")
        torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())
    loaded = torch.export.load(path).module()

    def run(images: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            return loaded(images)

    return run


def _write_onnx(module: DeployedScorer, images: Tensor, path: Path) -> Run:
    import onnxruntime

    count = len(module(images[:2])) - len(module.extras)
    outputs = [*_names(module.model)[:count], *module.extras]
    program = torch.onnx.export(
        module,
        (images,),
        input_names=[given := "images" if module.takes_images else "vectors"],
        output_names=outputs,
        dynamic_shapes=({0: _batch()},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    if module.takes_images:
        program.model.metadata_props["images"] = RESIZING.format(images.shape[1])
    # Weights within the file: it is one thing to copy.
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path.read_bytes())

    def run(images: Tensor) -> Sequence[Tensor]:
        found = session.run(outputs, {given: images.numpy()})
        return [torch.as_tensor(output) for output in found]

    return run


def _batch() -> torch.export.Dim:
    return torch.export.Dim("batch", min=1, max=65_536)


if __name__ == "__main__":
    print("usage: ood-osdre export RUN FILE, see ood-osdre export --help", file=sys.stderr)
    sys.exit(2)
