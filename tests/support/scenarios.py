"""Coroutine functions that are tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

Scenario = Callable[..., Coroutine[Any, Any, Any]]


def as_test(
    run: Callable[[Scenario], object], given: int = 0
) -> Callable[[Scenario], Callable[..., None]]:
    """Make a scenario a test. ``run`` calls it with its first ``given`` arguments, as often as it
    likes; the others are fixtures and parameters of the test."""

    def made(scenario: Scenario) -> Callable[..., None]:
        def test(*args: Any, **named: Any) -> None:
            run(lambda *first: scenario(*first, *args, **named))

        signature = inspect.signature(scenario)
        others = list(signature.parameters.values())[given:]
        test.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(test, name, getattr(scenario, name))
        return test

    return made
