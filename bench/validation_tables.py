"""Write the predicted and error columns of docs/validation.md anew for every published figure.

    python bench/validation_tables.py
"""

import re
from pathlib import Path

from rackplan.calibration.library import list_calibrations
from rackplan.calibration.validate import validate

PAGE = Path(__file__).resolve().parent.parent / "docs" / "validation.md"


def main() -> None:
    rows = {r["id"]: r for c in list_calibrations() for r in validate(c["name"])["rows"] if r["id"].startswith("F")}

    def fresh(match: re.Match[str]) -> str:
        row = rows.get(match["id"])
        if row is None:
            return match[0]
        return f"{match['head']} {row['predicted']:,.5g} | {row['error_pct']:+.1f} |"

    page = PAGE.read_text()
    # | id | what | measured | predicted | error |
    PAGE.write_text(re.sub(r"^(?P<head>\| (?P<id>F\d\d) \|[^|]*\|[^|]*\|)[^|]*\|[^|]*\|$", fresh, page, flags=re.M))


if __name__ == "__main__":
    main()
