r"""Exports the folded scorer, preprocessing inside, to a file that needs none of this package.

    python -m ood_osdre.export CHECKPOINT FILE.onnx
    python -m ood_osdre.export CHECKPOINT FILE.pt2

The file maps uint8 images `images`, with shape (B, H, W, 3) and any B, to `log_ratio`, with shape
(B), in nats (larger = more ID), and, if the network has a class head, to `logits`. Of a run that
sums parts it is `score`, without a unit. Before the file is written, each of them is compared with
the original on random images: the largest difference may be 1e-4 of its spread. A `.pt2` file is a
program for :func:`torch.export.load`; an `.onnx` file runs wherever ONNX does, and making one needs
the packages of the extra `export`.
"""

__all__ = ["DeployedScorer", "export_scorer"]

import argparse
import copy
import io
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from .detectors import Scorer, load_scorer
from .errors import UserError, exit_status
from .files import atomic_path, local
from .models import FoldedRatio, Prediction, RatioModel, RepresentationRatio, SummedScore

# The largest difference from the original, as a share of an output's standard deviation.
TOLERANCE = 1e-4
SAMPLES = 64
# What writes an ONNX file and runs it.
PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class DeployedScorer(nn.Module):
    r"""A scorer as one module, from stored images to log-ratios.

    Arguments:
        scorer: The trained scorer.
    """

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.model = copy.deepcopy(scorer.ratio).cpu().eval()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", scorer.preprocess.mean.cpu()[:, None, None])
        self.register_buffer("std", scorer.preprocess.std.cpu()[:, None, None])

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        r"""Returns the log-ratios, with shape :math:`(B)`, and the class logits if there are any.

        Arguments:
            images: The uint8 images, with shape :math:`(B, H, W, 3)`.
        """
        pixels = images.permute(0, 3, 1, 2).to(self.mean.dtype) / 255
        return _as_tuple(self.model.predict((pixels - self.mean) / self.std))


def export_scorer(scorer: Scorer, path: Path) -> float:
    r"""Writes a scorer as a `.pt2` or an `.onnx` file.

    Arguments:
        scorer: The trained scorer.
        path: The file to write.

    Returns:
        The largest difference of a log-ratio or logit from the original's on random images, as a
        share of their standard deviation.

    Raises:
        UserError: If the suffix is another one, a package is missing, the scorer is no ratio or
            integrates over time, or the file disagrees with the original.
    """
    writers = {".pt2": _write_program, ".onnx": _write_onnx}
    missing = [p for p in PACKAGES if path.suffix == ".onnx" and find_spec(p) is None]
    if path.suffix not in writers or missing:
        raise UserError(
            f"{path}: got the suffix {path.suffix!r}, expected .pt2, or .onnx with the packages "
            f"{', '.join(missing or PACKAGES)}: pip install 'ood-osdre[export]'."
        )
    for ratio in _networks(scorer.ratio):
        inner = ratio.ratio if isinstance(ratio, RepresentationRatio) else ratio
        if not isinstance(inner, FoldedRatio):
            raise UserError(
                f"{path}: got a {type(inner).__name__}, only one-step and direct ratios can be "
                "exported."
            )
    size = scorer.metadata["size"]
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (SAMPLES, size, size, 3), generator=generator, dtype=torch.uint8)
    # Of the scorer, not of the module: its preprocessing is to be right, too.
    expected = _outputs(scorer, images)
    module = DeployedScorer(scorer).eval()
    with atomic_path(path) as temporary:
        run = writers[path.suffix](module, images, temporary)
        # One at a time as well as together: the batch is free.
        found = [torch.cat(parts) for parts in zip(run(images[:1]), run(images[1:]), strict=True)]
        differences = [
            float((a - b).abs().max() / b.std()) for a, b in zip(found, expected, strict=True)
        ]
        for name, difference in zip(_names(scorer.ratio), differences, strict=False):
            if not difference <= TOLERANCE:
                raise UserError(
                    f"{path}: exported and original {name} differ by {difference:.1e} of their "
                    f"spread, expected at most {TOLERANCE:g}; nothing was written."
                )
    return max(differences)


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

    outputs = _names(module.model)[: len(module(images[:2]))]
    program = torch.onnx.export(
        module,
        (images,),
        input_names=["images"],
        output_names=list(outputs),
        dynamic_shapes=({0: _batch()},),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    # Weights within the file: it is one thing to copy.
    program.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path.read_bytes())

    def run(images: Tensor) -> Sequence[Tensor]:
        found = session.run(list(outputs), {"images": images.numpy()})
        return [torch.as_tensor(output) for output in found]

    return run


def _batch() -> torch.export.Dim:
    return torch.export.Dim("batch", min=1, max=65_536)


def main(argv: Sequence[str] | None = None) -> int:
    r"""Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m ood_osdre.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=local, metavar="CHECKPOINT", help="a run folder")
    parser.add_argument("file", type=local, metavar="FILE", help="ends in .onnx or .pt2")
    args = parser.parse_args(argv)
    return exit_status(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    r"""Exports the scorer of a run folder."""
    difference = export_scorer(load_scorer(args.checkpoint), args.file)
    print(f"{args.file}: agrees with {args.checkpoint} to {difference:.1e} of the outputs' spread")
    return 0


if __name__ == "__main__":
    sys.exit(main())
