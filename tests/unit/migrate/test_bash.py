"""What bash would make of a script's words, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import InvalidArgument
from headrace.migrate.bash import DECIDED_LATER, Script, read_script


def words(text: str) -> list[str]:
    """The words behind `run`."""
    script = Script(Path("run.sh"), {"HOME": ["/home/me"]})
    script.read(text)
    return (script.command_of("run") or ["", "no command"])[1:]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1; run $A ${A} \"$A b\" '$A'", ["1", "1", "1 b", "$A"]),
        ("A='x y'; run $A \"$A\"", ["x", "y", "x y"]),
        ("run a\\\n b # c", ["a", "b"]),
        ("A=( --x 1 # no\n --y 'a b' ); A+=(--z); run \"${A[@]}\" ${A[1]}", ["--x", "1", "--y", "a b", "--z", "1"]),
        ("run ${A:-d} ${A:-${B:-e}} ${HOME}/x ${A:+f}", ["d", "e", "/home/me/x"]),
        ("N=4; run $((N * 2)) $(( (N + 2) / 4 )) $((X + 1))", ["8", "1", "$((X + 1))"]),
        ("run $(nproc --all) `date` $1 $UNSET/x", ["$(nproc --all)", "$(date)", "$(1)", "${UNSET}/x"]),
        ('run "$@" ${NONE[@]} ""', [""]),
        ("run a > out.log 2>&1 | tee b &", ["a"]),
        ("cat <<EOF\nrun no\nEOF\nrun yes", ["yes"]),
        ("f() { local A=1; }\nrun $A", ["1"]),
        ("export A=1 B=2\nC=3 run $A $B", ["1", "2"]),
        ("A=a; A+=b; run $A", ["ab"]),
        ("C='run 1'; C=\"$C 2\"; eval $C", ["1", "2"]),
        ("srun bash -c \"cd x && run 1 '2 3'\"", ["1", "2 3"]),
        ('run \'{"image": "images"}\'', ['{"image": "images"}']),
    ],
)
def test_words_are_those_of_bash(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('A=1; if [ "$A" = "1" ]; then B=y; else B=n; fi; run $B', ["y"]),
        ('if [ "${N:-0}" -gt 0 ]; then B=y; elif [[ -n "" ]]; then B=e; else B=n; fi; run $B', ["n"]),
        ("if nvidia-smi; then B=y; fi; run $B", ["$(B)"]),
        ('[ "a" = "b" ] && B=y; run ${B:-n}', ["n"]),
        ('[ "a" = "b" ] || B=y; run ${B:-n}', ["y"]),
        ("for i in 1 2; do B=$i; done; run $B", ["$(B)"]),
        ("if [ -f x ]; then\n A+=(--x)\nfi\nrun ${A[@]}", [f"{DECIDED_LATER}--x"]),
        ("case $X in\n a) B=1;;\n *) B=2;;\nesac\nrun $B", ["$(B)"]),
    ],
)
def test_conditions_are_decided_where_a_script_says_enough(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    "text", ["'", '"', "$(", "${", "((", "a=(", "<<EOF", "if", "fi", "done", "else", "\\", "`", "|", ")", "$((", "&& a"]
)
def test_what_is_not_closed_is_read_to_its_end(text):
    assert words(text) == ["no command"]


def test_files_that_a_script_loads_are_looked_for_beside_it(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "q.sh").write_text("MODEL_ARGS=( --num-layers 2 )")
    (tmp_path / "run.sh").write_text(
        'D="$(cd "$(dirname "$0")" && pwd)"\nsource "${D}/models/q.sh"\nsource x/none.sh\nrun ${MODEL_ARGS[@]}\n'
    )
    script = read_script(tmp_path / "run.sh", {})
    assert script.command_of("run") == ["run", "--num-layers", "2"]
    assert script.missing == ["x/none.sh"]


def test_a_script_that_loads_itself_is_refused(tmp_path):
    (tmp_path / "run.sh").write_text("source run.sh\n")
    with pytest.raises(InvalidArgument, match="deep"):
        read_script(tmp_path / "run.sh", {})
