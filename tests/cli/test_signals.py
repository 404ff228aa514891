"""What signals do while a command runs, wherever its thread is just then."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal

import pytest

from rdzv_etcd.cli import end_as_ctrl_c_does


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_though_a_callback_of_c_drops_exceptions(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gRPC's callbacks do, while which it came once: the command continued to its time limit."""
    signal.signal(how, end_as_ctrl_c_does)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background

    def called_from_c() -> None:
        os.kill(os.getpid(), how)
        for _ in range(100):  # the handler runs between two of these
            pass

    async def command() -> None:
        callback = ctypes.CFUNCTYPE(None)(called_from_c)
        asyncio.get_running_loop().call_soon(callback)
        await asyncio.sleep(60)

    dropped: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", dropped.append)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(command())
    assert not dropped
