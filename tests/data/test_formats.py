"""Which files of a folder are read, and which data are no text although they could be read as such."""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import sqlite3
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from src.config.dataset_spec import train_specs
from src.data.open import open_source
from src.data.readers import files, find_files
from src.data.readers.text import TextSource
from src.data.readers.text_files import HEAD_BYTES, list_text_files, other_format
from src.data.types import InputSpec
from src.system.errors import UserError
from tests.data.every_source import write_records

ROOT = Path(__file__).parents[2]
RECORDS = [{"instruction": f"Say {n}.", "input": "", "output": f"{n}, of course;\nand more"} for n in range(300)]


def table(delimiter):
    output = io.StringIO()
    writer = csv.DictWriter(output, list(RECORDS[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(RECORDS)
    return output.getvalue()


def archive():
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as file:
        file.writestr("a.txt", "text")
    return output.getvalue()


def database(tmp_path):
    with sqlite3.connect(file := tmp_path / "pages.db") as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS pages (text)")
    return file.read_bytes()


def parquet(_):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    output = io.BytesIO()
    pq.write_table(pa.table({"text": ["one"]}), output)
    return output.getvalue()


def arrow(_):
    pa = pytest.importorskip("pyarrow")
    output, rows = io.BytesIO(), pa.table({"text": ["one"]})
    with pa.ipc.new_file(output, rows.schema) as writer:
        writer.write_table(rows)
    return output.getvalue()


LINES = "\n".join(map(json.dumps, RECORDS))
# Data in another format: what each is named, and what an error has to say of it.
DATA = {
    "an array": ("alpaca_data.json", json.dumps(RECORDS), "JSON array.*docs/data.md"),
    "an indented array": ("data.json", json.dumps(RECORDS, indent=4), "JSON array"),
    "an array of texts": ("texts.json", json.dumps(["one", "two", 'a "third"']), "JSON array"),
    "an array of ids": ("ids.json", json.dumps([list(range(100)), [1]]), "JSON array"),
    "an array that goes on": ("big.json", json.dumps([{"text": "x" * 3 * HEAD_BYTES}]), "JSON array"),
    "an array without an end": ("part.tmp", json.dumps(RECORDS)[:-100], "JSON array"),
    "an array after a mark": ("marked.json", "\ufeff" + json.dumps(RECORDS), "JSON array"),
    "an array that begins with nulls": ("data.json", json.dumps([None, None, *RECORDS]), "JSON array"),
    "lines": ("data.json", LINES, r"JSON lines: rename it to end with \.jsonl"),
    "lines of Spark": ("part-00000", LINES, "JSON lines"),
    "lines in capitals": ("A.JSONL", LINES, "JSON lines"),
    "lines of an editor": ("a.jsonl~", LINES, "JSON lines"),
    "lines kept": ("a.jsonl.bak", LINES, "JSON lines"),
    "lines that are loaded": ("a.tmp", LINES, "JSON lines"),
    "one object": ("part-00001", json.dumps(RECORDS[0]), "JSON object"),
    "one indented object": ("a.bak", json.dumps({"data": RECORDS}, indent=1), "JSON object"),
    "one line": ("a.ndjson", json.dumps(RECORDS[0]) + "\n", "JSON object"),
    "a table": ("train.csv", table(","), "table.*docs/data.md"),
    "a table of Windows": ("train", table(",").replace("\n", "\r\n"), "table"),
    "a table without names": ("numbers.csv", "1,2\n3,4\n", "table"),
    "tabs": ("train.tsv", table("\t"), "table"),
    "tabs under another name": ("train.txt", table("\t"), "table"),
    "semicolons": ("train.txt", table(";"), "table"),
    "a table of pandas, with its index": ("train.csv.bak", ",text,label\n0,one,1\n1,two,0\n", "table"),
    "a table with names in Russian": ("part-0", "номер,текст\n0,один\n1,два\n", "table"),
    "gzip": ("a.json.gz", gzip.compress(LINES.encode()), "compressed: unpack it first"),
    "gzip under another name": ("a.txt", gzip.compress(b"text"), "compressed"),
    "bzip2": ("a.txt.bz2", bz2.compress(b"text"), "compressed"),
    "xz": ("a.txt.xz", lzma.compress(b"text"), "compressed"),
    "zip": ("a.zip", archive(), "compressed"),
    "UTF-16": ("a.txt", "text é".encode("utf-16"), "UTF-16.*iconv"),
    "UTF-16, big-endian": ("a.txt", b"\xfe\xff" + "text".encode("utf-16-be"), "UTF-16"),
    "a database": ("pages.db", database, "SQLite.*docs/data.md"),
    "Parquet": ("data-0", parquet, "dataset_type=parquet"),
    "Arrow": ("data.arrow", arrow, "Arrow.*dataset_type=parquet"),
}


def place(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        data = content(folder) if callable(content) else content
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return str(folder)


def opened(path, **keys):
    return TextSource(str(path), 1 << 22, **keys)


def texts(source):
    return [source[i] for i in range(len(source))]


@pytest.mark.parametrize("case", DATA)
def test_data_in_another_format_are_an_error_that_says_what_reads_them(tmp_path, case):
    name, content, message = DATA[case]
    path = place(tmp_path / "d", {name: content, "README.md": "# Title\n", "LICENSE": "Free.\n"})
    for named in (path, f"{path}/*", f"{path}/{name}"):
        with pytest.raises(UserError, match=f"{name.replace('.', '[.]')} .*{message}"):
            opened(named)
    old = {"JSON lines", "JSON array", "JSON object", "table"}
    if any(kind in message for kind in old):  # what could be read is still read by a run that began so
        assert len(opened(f"{path}/{name}", rules=1)) == 1


@pytest.mark.parametrize("case", [case for case, (_, _, message) in DATA.items() if "JSON object" not in message])
def test_data_among_texts_are_an_error_too(tmp_path, case):
    name, content, message = DATA[case]
    path = place(tmp_path / "d", {name: content, "a/a.txt": "text", "b.jsonl": LINES})
    with pytest.raises(UserError, match=message):
        opened(path, column="output")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", json.dumps(RECORDS)), ("a.csv", "\ufeff" + table(",").replace("\n", "\r\n")), ("a.tsv", table("\t"))],
)
def test_the_script_that_the_errors_name_writes_lines(tmp_path, name, content):
    (script,) = re.findall(r"```python\n(# my_lines\.py\n.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)
    (tmp_path / name).write_text(content, newline="")
    (tmp_path / "my_lines.py").write_text(script)
    subprocess.run([sys.executable, "my_lines.py", name, "a.jsonl"], cwd=tmp_path, check=True)
    source = opened(tmp_path / "a.jsonl", column="output")
    assert [text.replace("\r", "") for text in texts(source)] == [record["output"] for record in RECORDS]


TEXTS = {
    "a list in Python": "[print(n) for n in range(10)]\n",
    "a dict in Python": '{1: "a", "b": 2}\n',
    "strings in Python": '["a"\n "b"][0].upper()\n',
    "an initialiser in C": '{ "a", "b" },\n{ "c", "d" },\n',
    "settings": "[section]\nkey = value, other\n",
    "a link": "[text](https://example.com), and more\n",
    "a source": "[1] A. Author, A title, 1999.\n[2] B. Author, A title, 2000.\n",
    "numbers of sources": "[1, 2] have shown this, [3, 4] that.\n",
    "a template": '{{ "text": value }}\n',
    "a tag": "{% if x %}\n",
    "a group in TeX": "{\\bf text}, and more\n",
    "a poem": "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.\n",
    "names": "Smith, John\nDoe, Jane\nRoe, Richard\n",
    "prose with commas": "One, two\nthree, four\nfive, six\n",
    "tabs in C": "int main(void)\t{\n\treturn 0;\t}\n",
    "a Makefile": "all:\tone two\n\tcc one.c\n",
    "a table in Markdown": "| a | b |\n| --- | --- |\n| 1 | 2 |\n",
    "one line with commas": "one,two,three",
    "YAML": "a: 1\nb: [1, 2]\n",
    "a page": "<!DOCTYPE html>\n<html><p>Text, and more</p></html>\n",
    "a patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n",
    "a picture": '<svg xmlns="http://www.w3.org/2000/svg"/>\n',
    "one character": "{",
    "none": " \n",
}


@pytest.mark.parametrize("case", TEXTS)
def test_text_is_read_whatever_it_begins_with(tmp_path, case):
    assert texts(opened(place(tmp_path, {"a": TEXTS[case]}))) == [TEXTS[case]]


@pytest.mark.parametrize("root", [sysconfig.get_path("stdlib"), ROOT / "src", ROOT / "tests", ROOT / "docs"])
def test_code_and_pages_are_text(root):
    names = [
        name for name in files.walk(str(root)) if name.endswith((".py", ".md", ".yml", ".c", ".h", ".txt", ".rst"))
    ]
    heads = {name: files.read(str(Path(root) / name), 0, HEAD_BYTES) for name in names if "site-packages" not in name}
    assert len(heads) > 20
    assert not {name: answer for name, data in heads.items() if (answer := other_format(name, data))}


def test_this_projects_pages_are_a_folder_of_text(capsys):
    source = TextSource(str(ROOT / "docs"), 1 << 22)
    listing = list_text_files(str(ROOT / "docs"), "dataset_path")
    assert len(source) == len(listing.sizes) > 30
    assert {Path(name).suffix for name in listing.sizes} == {".md", ".yml"}
    assert f"dataset_path={ROOT / 'docs'}: " in (said := capsys.readouterr().out)
    assert "files passed over: " in said


# ---- What is passed over in a folder


BESIDE = {
    "a.svg": "<svg/>",
    "b/c.PNG": b"\x89PNG\r\n\x1a\n\0",
    "d.diff": "--- a\n",
    "e.patch": "-",
    "f.json": '{"a": 1}',
    "n.ipynb": "{}",
}


def test_what_lies_beside_text_is_passed_over_and_listed(tmp_path, capsys):
    path = place(tmp_path, {"a.md": "A", "README.md": "R", **BESIDE})
    assert texts(opened(path)) == ["R", "A"]
    assert capsys.readouterr().out == (
        f"dataset_path={path}: 6 files passed over: a.svg, b/c.PNG, d.diff, e.patch, f.json and 1 more\n"
    )
    assert texts(opened(f"{path}/*.svg")) == ["<svg/>"]
    assert texts(opened(f"{path}/d.diff")) == ["--- a\n"]
    assert opened(path).fingerprint() == opened(place(tmp_path / "x", {"a.md": "A", "README.md": "R"})).fingerprint()


def test_pictures_alone_are_no_data(tmp_path):
    with pytest.raises(UserError, match="has no document: expected text files"):
        opened(place(tmp_path, {"a.svg": "<svg/>"}))


def test_readme_and_license_are_no_data_beside_lines(tmp_path, capsys):
    lines = {"data/train.jsonl": '{"text": "one"}', "README.md": "R", "LICENSE": "L", "dataset_infos.json": "{}"}
    path = place(tmp_path, lines)
    assert texts(opened(path)) == ["one"]
    assert "3 files passed over: LICENSE, README.md, dataset_infos.json" in capsys.readouterr().out
    (tmp_path / "readmes-of-others.jsonl").write_text('{"text": "two"}')
    assert texts(opened(path)) == ["one", "two"]


NAMES = ["_SUCCESS", "_metadata", "b/_committed_1", "_notes.txt", "_part.jsonl"]


def test_names_that_begin_with_an_underscore_are_passed_over_unless_they_are_code(tmp_path, capsys):
    read = {"__init__.py": "I", "_private.py": "P", "a/_a.c": "C", "a_b.txt": "T"}
    path = place(
        tmp_path, read | dict.fromkeys(NAMES, '{"a": 1}') | {"_e": "", "_f.json": "[1]", "_g.csv": "a,b\n1,2\n"}
    )
    assert texts(opened(path)) == ["I", "P", "C", "T"]
    assert "8 files passed over: _SUCCESS, _e, _f.json, _g.csv, _metadata and 3 more" in capsys.readouterr().out
    (tmp_path / "_notes.txt").write_text("notes")
    assert texts(opened(f"{path}/_notes.txt")) == ["notes"]


def test_a_folder_of_spark_or_of_the_hub_is_read(tmp_path, config, capsys):
    pytest.importorskip("pyarrow")
    from src.extras.readers.parquet import ParquetSource

    path = place(tmp_path, {"part-0.parquet": parquet, **dict.fromkeys(["_SUCCESS", "_metadata", "README.md"], "no")})
    assert texts(ParquetSource(*train_specs(config(dataset_type="parquet", dataset_path=path).data))) == ["one"]
    assert f"dataset_path={path}: 3 files passed over: README.md, _SUCCESS, _metadata\n" in capsys.readouterr().out
    (tmp_path / "b.parquet").write_text("damaged")
    with pytest.raises(UserError, match=r"b\.parquet can't be read as Parquet"):
        ParquetSource(*train_specs(config(dataset_type="parquet", dataset_path=path).data))


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = place(tmp_path, {"a.txt": "\ufeffone \ufeff", "b.jsonl": '\ufeff{"text": "\ufefftwo"}', "c.txt": "\ufeff"})
    assert texts(opened(path)) == ["one \ufeff", "\ufefftwo", ""]
    assert texts(opened(path, rules=1)) == ["\ufeffone \ufeff", "\ufefftwo", "\ufeff"]


# ---- Links


@pytest.fixture
def linked(tmp_path):
    """A folder with links to another folder, to one of its own by two names, to itself, and to a file."""
    place(
        tmp_path, {"top/a.txt": "A", "top/v1/b.txt": "B", "other/c.txt": "C", "other/d/e.txt": "E", "top/.h/f.txt": "F"}
    )
    top = tmp_path / "top"
    for link, target in {
        "there": "../other", "w": "v1", "up": "..", "v1/self": "../../top", "g.txt": "a.txt", "i": ".h", ".k": "v1"
    }.items():  # fmt: skip
        (top / link).symlink_to(target)
    return top


@pytest.mark.parametrize("path", ["", "/", "/**", "/**/*.txt", "/**/**/*.txt", "/*", "/*/*.txt"])
def test_links_are_followed_and_each_folder_is_read_once(linked, path):
    assert "".join(sorted(texts(opened(f"{linked}{path}")))) == {"/*": "AA", "/*/*.txt": "BBCF"}.get(path, "AABCEF")


def test_a_glob_takes_what_it_took_before_where_nothing_is_linked(tmp_path):
    names = [
        "a.txt",
        "b/a.txt",
        "b/c/a.txt",
        "b/c/d/a.md",
        "e/c/a.txt",
        ".h/a.txt",
        "b/.h/a.txt",
        "b/.a.txt",
        "x[1]/a.txt",
    ]
    place(tmp_path, dict.fromkeys(names, "x"))
    wanted = [
        "**",
        "**/*",
        "*/**",
        "**/*.txt",
        "b/**",
        "b/**/a.txt",
        "**/c/*.txt",
        "**/c/**/*",
        "*/c/**/*.md",
        "b/**/**/*.txt",
    ]
    wanted += ["*/a.txt", "[be]/*/a.txt", "b**/*.txt", ".h/**", "x[[]1]/**", "**/?.md"]
    found = {}
    for pattern in wanted:
        now, before = (find_files.list_files(f"{tmp_path}/{pattern}", "k", rules) for rules in (2, 1))
        found[pattern] = list(now.sizes)
        assert now == before, pattern
    assert found["**/c/*.txt"] == ["b/c/a.txt", "e/c/a.txt"]
    with pytest.raises(UserError, match="no file that matches"):
        find_files.list_files(f"{tmp_path}/none/**", "k")


def test_a_run_of_older_rules_reads_what_it_read(linked):
    assert sorted(texts(opened(linked, rules=1))) == ["A", "A", "B"]


# ---- Null


def rows(config, split):
    """Documents of which one is null, as `dataset_factory` gives them."""
    return [{"text": "one"}, {"text": None}, {"text": "two"}]


def one_by_one(config, split):
    """The same, from an iterable."""
    yield from rows(config, split)


def write_nulls(folder, kind):
    """Writes `rows` in a format; returns the settings that read them."""
    folder.mkdir()
    records = [json.dumps(row) for row in rows(None, None)]
    settings = {"dataset_type": kind, "dataset_path": str(folder)}
    match kind:
        case "text":
            (folder / "a.jsonl").write_text("\n".join(records))
        case "hf":
            pytest.importorskip("datasets")
            (folder / "train.jsonl").write_text("\n".join(records))
        case "parquet":
            pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            pq.write_table(pa.Table.from_pylist(rows(None, None)), folder / "a.parquet")
        case "array_record":
            pytest.importorskip("array_record")
            write_records(folder / "a.array_record", map(str.encode, records))
            settings["array_record_format"] = "json"
        case _:
            settings = {"dataset_type": "custom", "dataset_factory": f"tests.data.test_formats:{kind}"}
    return settings


@pytest.mark.parametrize("kind", ["text", "hf", "parquet", "array_record", "rows", "one_by_one"])
def test_a_null_is_an_empty_document_everywhere_and_is_counted(tmp_path, config, capsys, kind):
    settings = write_nulls(tmp_path / "d", kind)
    (spec,) = train_specs((keys := config(**settings)).data)
    source = open_source(spec, InputSpec.of(keys, None))
    found = source.items(source.open(0, None)[0], 0) if kind == "hf" else texts(source)
    assert found == ["one", "", "two"]
    assert "=" in (said := capsys.readouterr().out)
    assert "null documents read so far, as empty ones: 1\n" in said


def test_nulls_are_counted_in_powers_of_ten(tmp_path, capsys):
    source = opened(place(tmp_path, {"a.jsonl": '{"text": null}\n' * 25 + '{"text": "one"}'}))
    counts = re.findall("as empty ones: (.*)", capsys.readouterr().out)
    assert counts == ["1", "10"]  # at the start, where all are read
    assert texts(source) == [""] * 25 + ["one"]
