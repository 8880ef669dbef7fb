r"""OS-DRE inside OpenOOD: a postprocessor, a trainer, a network, and their registration.

.. code-block:: python

    from openood.evaluation_api import Evaluator
    from ood_osdre.plugin.openood import OSDRENet, OSDREPostprocessor

    net = OSDRENet.load("runs/cifar10")
    Evaluator(net, "cifar10", postprocessor=OSDREPostprocessor()).eval_ood()

All of it works without OpenOOD too, on any loaders of its form. Importing this package imports
OpenOOD if it is there, whose class :class:`OSDREPostprocessor` then derives from; if that fails,
for whatever reason, :func:`explain_import` says why. Nothing of OpenOOD is contained here.
"""

__all__ = [
    "OSDRENet",
    "OSDREPostprocessor",
    "OSDRETrainer",
    "eval_ood",
    "explain_import",
    "is_importable",
    "register",
    "unregister",
]

from .host import eval_ood, explain_import, is_importable
from .network import OSDRENet
from .postprocessor import OSDREPostprocessor
from .registration import register, unregister
from .trainer import OSDRETrainer
