"""The README says what the code says, where it repeats it."""

from __future__ import annotations

from pathlib import Path

from rdzv_etcd.settings.options import options_table

README = Path(__file__).parents[1] / "README.md"


def test_the_option_table_is_the_code_s() -> None:
    """If this fails, put the output of ``options_table()`` between the markers."""
    _, _, rest = README.read_text(encoding="utf-8").partition("<!-- options:begin -->\n")
    shown, end, _ = rest.partition("<!-- options:end -->")
    assert end, "the README has lost its markers"
    assert shown.strip() == options_table().strip()
