"""No limit of a real relay is exceeded, as its receivers see it: a short run of `tests.bench.limits`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.limits.run import run
from tests.bench.limits.table import lines


@pytest.mark.alone  # receivers that come too late themselves see turns that are too close
async def test_no_limit_is_exceeded_as_receivers_see_it(tmp_path: Path) -> None:
    seen = await run(tmp_path, 10.0, reloads=3)
    table = "\n".join(lines(seen))
    assert seen.exceeded == [], table
    assert seen.is_good, table
    assert seen.reloads == 3
    by_name = {observed.name: observed.history[0] for observed in seen.report.observed}
    for name in ("rated", "paced", "half", "shared c"):
        used = by_name[name].used
        assert used is not None
        assert used > 0.6, table
    assert by_name["provider"].connections == by_name["provider"].promise.connections, table
    assert by_name["silent"].connections > 0, table
