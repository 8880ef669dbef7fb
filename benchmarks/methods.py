r"""The methods of the comparison, as options of the main command.

Within a group all see the same data with the same augmentation, the same backbone, but for a row
that is named after its U-Net, and the same number of steps of the same size.

- `ratio`: density-ratio estimators and nothing else: no class term, no broadened reference.
- `paper-style`: the same losses in the form of the paper's code: reference and ID batch pass the
  network apart, four fifths of the reference are ID images, no crops. (NCE is the logistic loss.)
  Of the logistic loss, each of the three alone as well.
- `class`: everything that can carry a class term has one, and whatever sees a reference sees it
  broadened.

Time-conditioned networks have group normalisation, as batch normalisation would couple the times
of a batch; the rest have the configuration's.
"""

from dataclasses import replace

from grid import Method

TITLES = {
    "logistic": "Logistic", "infonce": "InfoNCE", "chisq": "ChiSq", "pw": "PW",
    "kliep": "KLIEP", "lsif": "LSIF",
}  # fmt: skip
NFE = {
    **{f"NFE {n}": [f"evaluation.evaluations={n}"] for n in (2, 5, 50, 100, 200)},
    "adaptive": ["evaluation.solver=ode"],
}

PAPER_STYLE = ("infonce", "chisq", "pw", "logistic")

PLAIN = ["objective.class_weight=0", "data.broaden=0"]
OFF = [*PLAIN, "objective.endpoint=0"]
DIRECT_RATIO = ["estimator=direct", "objective.endpoint=1"]
STYLE = {
    "separate forwards": "objective.separate_forwards=true",
    "mixture": "data.mixture=0.8",
    "no crops": "data.crop=0",
}
TIMED = ["estimator=time_conditioned", "network.norm=group", *OFF]
PAPER = [
    *OFF, "basis.size=400", "path.schedule=kumaraswamy_spherical", "path.noise=ddbi",
    "times.kind=logit_normal", "objective.weight=inverse_variance", "objective.path_variance=1",
    "objective.conditional=1",
]  # fmt: skip
CLASS = ["objective.class_weight=0.5", "data.broaden=0.33"]
CLASSIFIER = ["estimator=classifier", "objective.endpoint=0"]


def ratio_methods() -> dict[str, Method]:
    r"""Returns the estimators of the group `ratio` and their paper-style forms."""
    methods = {
        TITLES[loss]: Method([*PLAIN, *DIRECT_RATIO, f"objective.endpoint_loss={loss}"])
        for loss in TITLES
    }
    methods |= {
        "DRE-∞": Method(
            [*TIMED, "path.noise=dequantisation", "objective.weight=constant",
             "objective.time_score=1"], NFE,
        ),
        "D³RE": Method(
            [*TIMED, "times.kind=logit_normal", "objective.weight=inverse_variance",
             "objective.conditional=1"], NFE,
        ),
        # As in the tasks: no thin bridge, whose noise drowns the rest, and times up to both ends.
        "D³RE, wide bridge": Method(
            [*TIMED, "path.gamma2=0.5", "objective.weight=inverse_variance",
             "objective.conditional=1"],
        ),
        "OS-DRE, conditional (paper)": Method(PAPER),
        "OS-DRE, joint (paper), U-Net": Method(
            [*PAPER, "network.kind=unet", "network.norm=group", "network.classes_head=false",
             "objective.conditional_form=antithetic", "objective.data_score=1"],
        ),
        "OS-DRE, time score matching": Method(
            [*OFF, "objective.weight=constant", "objective.time_score=1"]
        ),
        "OS-DRE, time score matching, stratified": Method(
            [*OFF, "objective.weight=constant", "objective.time_score=1",
             "times.stratified=true"]
        ),
        # The least noisy form of the same: even times, and a derivative in time that is smooth.
        "DRE-∞, stratified, one octave": Method(
            [*TIMED, "path.noise=dequantisation", "objective.weight=constant",
             "objective.time_score=1", "times.stratified=true", "network.octaves=1"],
        ),
        # And the one step with its objective, path, normalisation and times.
        "OS-DRE, as DRE-∞, stratified": Method(
            [*OFF, "network.norm=group", "path.noise=dequantisation",
             "objective.weight=constant", "objective.time_score=1", "times.stratified=true"]
        ),
        # With the normalisation of DRE-∞, whose objective it is.
        "OS-DRE, time score matching, group normalisation": Method(
            [*OFF, "network.norm=group", "objective.weight=constant", "objective.time_score=1"]
        ),
        "OS-DRE, path difference": Method(
            [*OFF, "objective.weight=constant", "objective.path_difference=1"]
        ),
        "OS-DRE, end-point": Method([*PLAIN, "objective.endpoint=1"]),
    }  # fmt: skip
    methods = {name: replace(m, group="ratio") for name, m in methods.items()}
    return methods | {
        f"{TITLES[loss]}, {style}": Method(
            [*PLAIN, *DIRECT_RATIO, f"objective.endpoint_loss={loss}", *options],
            group="paper-style",
        )
        for loss, style, options in (
            *((loss, "paper-style", STYLE.values()) for loss in PAPER_STYLE),
            *(("logistic", part, [option]) for part, option in STYLE.items()),
        )
    }


def class_methods() -> dict[str, Method]:
    r"""Returns the methods of the group `class`."""
    methods = {
        "classifier, softmax": Method(
            [*CLASSIFIER, "objective.class_weight=1", "data.broaden=0"],
            {
                "energy": ["evaluation.score=energy"],
                "nearest neighbours": ["evaluation.score=knn"],
            },
        ),
        "outlier exposure + broad": Method(
            [*CLASSIFIER, "objective.class_weight=1", "objective.outlier_exposure=0.5",
             "data.broaden=0.33"],
        ),
        "Logistic + class + broad": Method([*DIRECT_RATIO, *CLASS]),
        "OS-DRE, end-point + class + broad": Method(["objective.endpoint=1", *CLASS]),
        "OS-DRE, end-point + class + broad + time score matching": Method(
            ["objective.endpoint=1", *CLASS, "objective.weight=constant",
             "objective.time_score=0.02"],
        ),
        "OS-DRE, end-point + class + broad + path difference": Method(
            ["objective.endpoint=1", *CLASS, "objective.weight=constant",
             "objective.path_difference=0.05"],
        ),
    }  # fmt: skip
    return {name: replace(m, group="class") for name, m in methods.items()}


METHODS = ratio_methods() | class_methods()
