"""Coroutine functions that are tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

Scenario = Callable[..., Coroutine[Any, Any, Any]]


def as_test(
    run: Callable[..., object], given: int = 0, options: Sequence[str] = ()
) -> Callable[[Scenario], Callable[..., None]]:
    """Make a scenario a test. ``run`` calls it with its first ``given`` arguments, as often as it
    likes; the others are fixtures and parameters of the test. Of these, ``run`` itself gets those
    named in ``options``."""

    def made(scenario: Scenario) -> Callable[..., None]:
        def test(*args: Any, **named: Any) -> None:
            taken = {name: named.pop(name) for name in options}
            run(lambda *first: scenario(*first, *args, **named), **taken)

        signature = inspect.signature(scenario)
        others = list(signature.parameters.values())[given:]
        others += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in options]
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(test, name, getattr(scenario, name))
        return test

    return made
