r"""What a mistyped word may have meant."""

__all__ = ["did_you_mean", "nearest"]

import difflib
from collections.abc import Iterable

# Half of a word's letters agree with too many others by chance.
CUTOFF = 0.6


def nearest(word: str, choices: Iterable[str]) -> str | None:
    r"""Returns the choice closest in spelling to `word`, None if none is close.

    A choice with dots may also be met by its last part alone: `steps` for `training.steps`.

    Arguments:
        word: What was written.
        choices: What could have been meant.
    """
    choices = list(choices)
    whole = [c.lower() for c in choices]
    tails = [c.rpartition(".")[2] for c in whole]
    word = word.lower()
    if word in tails:
        return choices[tails.index(word)]
    if word and sum(c.startswith(word) for c in whole) == 1:
        return next(c for c in choices if c.lower().startswith(word))
    for names in (whole, tails):
        for match in difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF):
            return choices[names.index(match)]
    return None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    r"""Returns `" (did you mean 'x'?)"` with the nearest choice, or an empty string.

    Arguments:
        word: What was written.
        choices: What could have been meant.

    Example:
        >>> did_you_mean("cifar_10", ["cifar10", "cifar100", "digits"])
        " (did you mean 'cifar10'?)"
        >>> did_you_mean("imagenet", ["cifar10", "digits"])
        ''
    """
    near = nearest(word, choices)
    return f" (did you mean {near!r}?)" if near else ""
