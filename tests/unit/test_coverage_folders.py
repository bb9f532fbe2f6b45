"""The table of `make coverage`."""

from tests.coverage_folders import table


def test_files_are_summed_per_folder():
    def file(statements, covered):
        return {"summary": {"num_statements": statements, "covered_lines": covered}}

    rows = table(
        {
            "files": {
                "ppfleet/data/a.py": file(10, 5),
                "ppfleet/data/x/b.py": file(10, 10),
                "ppfleet/job.py": file(20, 20),
            }
        }
    )
    assert [row.split() for row in rows[1:]] == [
        ["ppfleet/data/", "20", "15", "75.0"],
        ["ppfleet/job.py", "20", "20", "100.0"],
        ["total", "40", "35", "87.5"],
    ]
