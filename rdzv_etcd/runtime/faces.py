"""The two faces of the library, blocking and asyncio, made from classes that are written once.

Such a class (``AnyGroup``, ``AnyWorld``, …) has its properties, what answers from memory, and for
all else coroutines that run on the library's event loop, each marked as a :class:`Call`. A subclass
that is also :class:`Blocking` gets a plain method for each of them, one that is :class:`Asyncio` an
``async`` one, with the same name, parameters and documentation::

    class AnyWorld:
        @Call
        async def barrier(self, name: str) -> None: ...

    class World(Blocking, AnyWorld): ...     # world.barrier("saved")
    class AioWorld(Asyncio, AnyWorld): ...   # await world.barrier("saved")

How a call crosses to the loop, and what becomes of it when it is interrupted, cancelled, made in a
forked child or on the library's own thread, is :class:`~rdzv_etcd.runtime.lifecycle.Lifecycle`'s.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine
from functools import partial, update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
)

from rdzv_etcd.errors import RdzvEtcdError

P = ParamSpec("P")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
"""What a call returns."""

_Undo: TypeAlias = "Callable[[Any, BaseException, list[Any]], Coroutine[Any, Any, None]]"
_ResultInstead: TypeAlias = "Callable[[Any, RdzvEtcdError], list[Any]]"


class Runner(Protocol):
    """Runs coroutines on the library's event loop, for a face's ``_part``."""

    def run(self, work: Coroutine[Any, Any, T], /) -> T: ...

    def call(self, work: Coroutine[Any, Any, T], /) -> Coroutine[Any, Any, T]: ...

    def begin(self, work: Coroutine[Any, Any, None], /) -> None: ...


class Call(Generic[P, R_co]):
    """A method of both faces; see the module.

    It is written as a coroutine function, or as a function that does something in the caller's
    thread and returns a coroutine.
    """

    def __init__(self, work: Callable[Concatenate[Any, P], Coroutine[Any, Any, R_co]]) -> None:
        self._work: Callable[..., Coroutine[Any, Any, R_co]] = work
        self._undo: _Undo | None = None
        self._instead: _ResultInstead | None = None

    def if_interrupted(self, undo: _Undo) -> _Undo:
        """Run ``undo`` on the loop if the caller is interrupted or cancelled: it gets what was
        raised, and a list with the result, which is empty if the call was not done."""
        self._undo = undo
        return undo

    def if_failed(self, instead: _ResultInstead) -> _ResultInstead:
        """Ask ``instead`` if the call raises one of the library's errors, as it does when this node
        has left: it returns a list with the result, or an empty one to raise the error."""
        self._instead = instead
        return instead

    def blocking(self) -> Callable[..., R_co]:
        """Make the method of a :class:`Blocking` face."""

        def method(face: Any, /, *args: Any, **given: Any) -> R_co:
            work, done = None, list[R_co]()
            try:
                work, part = self._work(face, *args, **given), cast(Runner, face._part)
                return part.run(_noting(work, done))
            except BaseException as error:
                if instead := self._after(face, error, work, done):
                    return instead[0]
                raise

        return method

    def awaited(self) -> Callable[..., Coroutine[Any, Any, R_co]]:
        """Make the method of an :class:`Asyncio` face."""

        async def method(face: Any, /, *args: Any, **given: Any) -> R_co:
            work, done = None, list[R_co]()
            try:
                work, part = self._work(face, *args, **given), cast(Runner, face._part)
                return await part.call(_noting(work, done))
            except BaseException as error:
                if instead := self._after(face, error, work, done):
                    return instead[0]
                raise

        return method

    def _after(
        self,
        face: Any,
        error: BaseException,
        work: Coroutine[Any, Any, R_co] | None,
        done: list[R_co],
    ) -> list[R_co]:
        """Do what follows a failure; return a list with what the call returns nevertheless."""
        if work is not None and inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
            work.close()
        if isinstance(error, RdzvEtcdError):
            return [] if self._instead is None else self._instead(face, error)
        if self._undo is not None and work is not None:  # without it, the arguments were refused
            face._part.begin(self._undo(face, error, done))
        return []

    def as_method(self, method: Callable[..., Any], cls: type, names: dict[str, str]) -> Any:
        """Let ``help()``, ``inspect`` and a traceback show the method as if it were written in
        ``cls``; ``names``: what its type variables stand for."""
        update_wrapper(method, self._work)
        method.__qualname__ = f"{cls.__qualname__}.{method.__name__}"
        written = str(method.__annotations__.get("return"))
        returned = re.sub(r"^Coroutine\[Any, Any, (.*)\]$", r"\1", written)
        returned = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), returned)
        method.__annotations__ = {**method.__annotations__, "return": returned}
        signature = inspect.signature(self._work).replace(return_annotation=returned)
        method.__signature__ = signature  # type: ignore[attr-defined]
        return method

    if TYPE_CHECKING:

        @overload
        def __get__(self, face: Blocking, owner: Any = None) -> Callable[P, R_co]: ...

        @overload
        def __get__(
            self, face: Asyncio, owner: Any = None
        ) -> Callable[P, Coroutine[Any, Any, R_co]]: ...

        @overload
        def __get__(self, face: None, owner: Any = None) -> Callable[..., Any]: ...

        def __get__(self, face: Any, owner: Any = None) -> Any: ...


class LastCall(Call[P, None]):
    """The method that ends what its face stands for; see
    :meth:`~rdzv_etcd.runtime.lifecycle.Lifecycle.end`."""

    def blocking(self) -> Callable[..., None]:
        def method(face: Any, /, *args: Any, **given: Any) -> None:
            face._part.end(self._bound(face, *args, **given))

        return method

    def awaited(self) -> Callable[..., Coroutine[Any, Any, None]]:
        async def method(face: Any, /, *args: Any, **given: Any) -> None:
            await face._part.end_awaited(self._bound(face, *args, **given))

        return method

    def _bound(self, *args: Any, **given: Any) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return the last work. Raises TypeError now: later it could not be done again."""
        inspect.signature(self._work).bind(*args, **given)
        return partial(self._work, *args, **given)


class _Face:
    """Gets a method for each :class:`Call` of its bases. Its ``_part`` is a :class:`Runner`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        names = {
            variable.__name__: argument.__name__
            for base in vars(cls).get("__orig_bases__", ())
            for variable, argument in zip(
                getattr(get_origin(base), "__parameters__", ()), get_args(base), strict=False
            )
        }
        for base in cls.__mro__[1:]:
            for name, found in vars(base).items():
                if isinstance(found, Call) and inspect.getattr_static(cls, name) is found:
                    method = found.blocking if issubclass(cls, Blocking) else found.awaited
                    setattr(cls, name, found.as_method(method(), cls, names))


class Blocking(_Face):
    """Calls block until they are done."""


class Asyncio(_Face):
    """Calls are awaited, on any event loop."""


async def _noting(work: Coroutine[Any, Any, R_co], done: list[R_co]) -> R_co:
    done.append(await work)
    return done[0]
