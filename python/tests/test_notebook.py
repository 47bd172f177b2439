"""What notebooks show: cells run by nbclient in a kernel of this Python, and the notebook made into a page by nbconvert."""
import base64
import os

import pytest

nbclient = pytest.importorskip("nbclient")
nbconvert = pytest.importorskip("nbconvert")
pytest.importorskip("ipykernel")
import nbformat  # noqa: E402 (comes with nbclient)

TRACE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/golden/caught-oom.gtr")
CELLS = [
    f"import gputrace; trace = {os.path.normpath(TRACE)!r}",
    "gputrace.report(trace)",
    "gputrace.report(trace).verdict",
    "gputrace.report(trace).tables['owners']",
    "gputrace.load(trace, to='rows')",
    "gputrace.timeline(trace)",
    "print(gputrace.report(trace))",
]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        os.environ[name] = str(tmp_path_factory.mktemp(name.lower()))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    nbformat.validate(notebook)
    return notebook


def shown(notebook, at):
    [output] = notebook.cells[at].outputs
    return output


def test_a_report_shows_its_verdict_and_its_tables(notebook):
    data = shown(notebook, 1).data
    assert "<b>Verdict: out of memory: tensors kept by a caught exception</b>" in data["text/html"]
    assert data["text/html"].count("<table>") > 4 and '<td align="right">502.25 MiB</td>' in data["text/html"]
    assert "Memory by owner" in data["text/plain"]
    assert "leave the `except` block" in shown(notebook, 2).data["text/html"]


def test_tables_and_rows_show_as_tables(notebook):
    assert "<th>own" in shown(notebook, 3).data["text/html"] and "cuBLAS" in shown(notebook, 3).data["text/html"]
    assert "more rows" in shown(notebook, 4).data["text/html"]


def test_a_timeline_shows_as_a_picture_with_its_size(notebook):
    output = shown(notebook, 5)
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG") and "peak 502.25 MiB" in output.data["text/plain"]
    assert output.metadata["image/png"] == {"width": 820, "height": 200}


def test_printing_a_report_gives_its_text(notebook):
    assert shown(notebook, 6).text.startswith(os.path.normpath(TRACE)) and "Verdict: out of memory" in shown(notebook, 6).text


def test_a_page_of_the_notebook_has_all_of_it_without_a_network(notebook):
    page, _ = nbconvert.HTMLExporter(template_name="basic").from_notebook_node(notebook)
    assert 'src="data:image/png;base64,' in page and "tensors kept by a caught exception" in page
    for output in (1, 2, 3, 4, 5):
        html = shown(notebook, output).data.get("text/html", "")
        assert "<script" not in html and "<iframe" not in html and "http" not in html
