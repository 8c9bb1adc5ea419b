"""Kinds of answers that the math scorer has to tell apart: each test has right and wrong answers of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from headrace.score import ScoreItem
from services.reward.registry import cpu_limit
from services.reward.scorers import dapo, deepscaler, math

Answers = Mapping[str, tuple[Sequence[str], Sequence[str]]]
"""Label → (right answers, wrong answers)."""


def paid(response: str, label: str) -> bool:
    return math.score(ScoreItem(item_id="1", prompt="", response=response, label=label)) == 1.0


def wrongly_scored(answers: Answers, form: str = r"\boxed{{{}}}") -> list[tuple[str, str, str]]:
    return [
        (label, answer, verdict)
        for label, (right, wrong) in answers.items()
        for verdict, given in (("right", right), ("wrong", wrong))
        for answer in given
        if paid(form.format(answer), label) != (verdict == "right")
    ]


def test_values_that_are_very_small_or_very_close_are_told_apart() -> None:
    assert not wrongly_scored(
        {
            r"\left(\frac{2}{7}\right)^{80}": (
                [r"\frac{2^{80}}{7^{80}}", r"(2/7)^{80}", r"\left(\frac72\right)^{-80}"],
                [r"\left(\frac{2}{7}\right)^{79}", "0", r"(2/7)^{81}"],
            ),
            r"1-\frac{1}{2^{70}}": ([r"\frac{2^{70}-1}{2^{70}}"], ["1", r"1-\frac{1}{2^{71}}"]),
            r"\sqrt{2}+10^{-40}": ([r"10^{-40}+\sqrt2"], [r"\sqrt2", r"\sqrt2-10^{-40}"]),
            r"\frac{5!\cdot 47!}{52!}": ([r"\frac{1}{2598960}"], [r"\frac{47!}{52!}", r"\frac{1}{2598961}"]),
            r"10^{-30}x": ([r"\frac{x}{10^{30}}"], ["10^{-31}x", "0"]),
            r"10^{-20}i": ([r"\frac{i}{10^{20}}"], ["10^{-21}i", "0"]),
            r"\begin{pmatrix}3^{-60}\\1\end{pmatrix}": (
                [r"\begin{pmatrix}\frac{1}{3^{60}}\\1\end{pmatrix}"],
                [r"\begin{pmatrix}3^{-61}\\1\end{pmatrix}"],
            ),
            r"\{7^{-50},1\}": ([r"\{1,\frac{1}{7^{50}}\}"], [r"\{1,7^{-51}\}", r"\{0,1\}"]),
            r"[0,10^{-25}]": ([r"[0,\frac{1}{10^{25}}]"], [r"[0,10^{-24}]"]),
            r"x=10^{-20}": ([r"10^{-20}"], ["x=10^{-21}", "x=0"]),
            "x>10^{-20}": ([r"(10^{-20},\infty)"], ["x>10^{-21}", "x>0"]),
            "7^{2023}": ([r"7\cdot 7^{2022}"], ["7^{2022}", "7^{2023}+1"]),
        }
    )


def test_a_symbol_in_upright_letters_is_a_symbol_and_no_unit() -> None:
    assert not wrongly_scored(
        {
            "7": (
                [r"7\,\mathrm{kg}", r"7\text{ km/h}"],
                [r"7\mathrm{i}", r"7\text{e}", r"7\mathrm{\pi}", r"7\mathrm{x}"],
            ),
            "e^{-4}": (
                [r"\mathrm{e}^{-4}", r"\exp(-4)", "exp(-4)", r"\frac{1}{\mathrm{e}^4}", "e^-4"],
                [r"\mathrm{e}^4"],
            ),
            r"\ln 7": ([r"\mathrm{ln} 7", r"\operatorname{ln}(7)", "ln 7"], [r"\log 7"]),
            r"\frac{\pi}{6}": ([r"\operatorname{arcsin}\frac12", "arcsin(1/2)", r"\frac{\mathrm{\pi}}{6}"], ["30"]),
            "e^{2x}": ([r"\exp(2x)", r"\operatorname{exp}(2x)", r"\mathrm{e}^{2x}"], ["e^2x", r"2\mathrm{e}^x"]),
        }
    )


def test_complex_numbers_are_computed_with_however_they_are_spaced() -> None:
    assert not wrongly_scored(
        {
            "6-5i": (
                ["6 - 5 i", r"6-5\cdot i", r"-5\,\mathrm{i}+6", r"6-5\imath"],
                ["6+5i", "5-6i", "6-5", "1", "6-5j"],
            ),
            r"\frac{2-i}{5}": (
                [r"\frac{1}{2+i}", r"\frac25-\frac15i", "0.4-0.2i"],
                [r"\frac{1}{2-i}", r"\frac{2+i}{5}"],
            ),
            r"e^{i\pi/3}": ([r"\frac{1+\sqrt{3}i}{2}", r"\cos 60^\circ+i\sin 60^\circ"], [r"\frac{1-\sqrt3 i}{2}"]),
            "-2i": (["(1-i)^2", r"-2\,i", r"i\cdot(-2)"], ["2i", "-2", "(1+i)^2"]),
            r"-1\pm 2i": (["-1+2i, -1-2i", r"x=-1\pm2i"], ["-1+2i", r"-1\pm2"]),
        }
    )


def test_words_for_numbers_are_part_of_the_number() -> None:
    assert not wrongly_scored(
        {
            "3000000": (
                ["3 million", r"3\text{ million}", r"\$3 million", "3 million dollars"],
                ["3", "3 billion", "3 thousand"],
            ),
            r"7\text{ billion}": (["7,000,000,000", r"7\times 10^9", "7 billion"], ["7", r"7\text{ million}"]),
            "7": (
                ["7 dollars", r"7\text{th}"],
                ["7 squared", "7 cubed", "7 dozen", r"7\text{ thirds}", "7 hundredths", "7 factorial"],
            ),
            "49": (["7 squared", r"7\text{ squared}"], ["7", "9 squared"]),
            r"\frac{7}{3}": (["7 thirds", r"7\text{ thirds}"], ["7", "7 fourths"]),
            "36": (["3 dozen", "36 eggs"], ["3"]),
        }
    )


def test_words_behind_a_number_are_units_only_where_they_name_something() -> None:
    assert not wrongly_scored(
        {
            "9": (
                [
                    "9 apples",
                    "9 square feet",
                    "9 miles per hour",
                    r"9\text{ different ways}",
                    "9 m/s",
                    r"9\text{ cm}^3",
                    "9 hr",
                ],
                [
                    *(
                        "9 or more",
                        r"9\text{ or fewer}",
                        "9 is false",
                        "9 at most",
                        "9 maybe",
                        "9 cannot be",
                        "9 and up",
                    ),
                    *(
                        r"9\text{ if }x>0",
                        r"9\text{ but not }10",
                        "9 minimum",
                        "9 plus",
                        "9 ab",
                        "9t",
                        "9s",
                        "9d",
                        "9?",
                    ),
                ],
            ),
            r"10\text{ cm}": (["10", "10 centimeters"], ["10 m", r"10\text{ cm}^2", "10 or 11"]),
            r"8\text{ or more}": ([r"8\text{ or more}", "8 or more"], ["8", "8 or less"]),
        }
    )


@pytest.mark.parametrize("label", ["42", "17"])
def test_an_answer_that_hedges_or_leaves_the_choice_open_is_not_paid(label: str) -> None:
    other = str(int(label) + 1)
    wrong = (
        rf"{label} \approx {other}", rf"{label} \cong {other}", rf"{label} \equiv {other}", rf"\min({label},{other})",
        rf"\max({label}, 1)", rf"x=\min({label},{other})", rf"\gcd({label},0)", rf"\lfloor {label}.9\rfloor",
        rf"{label} \bmod 1000", rf"{label}\text{{ or more}}", rf"\text{{at least }}{label}", rf"\ge {label}",
        rf"\ne {label}", rf"{label}\text{{ or }}{other}", rf"{label} \pm 1", rf"{label}\ldots {other}", rf"{label}_1",
        rf"{label} {other}", rf"{label}\text{{ is wrong}}", rf"{label[0]} {label[1]}", rf"{label}\phantom{{1}}",
        rf"\int_0^{{{label}}}1\,dx",
    )  # fmt: skip
    right = (rf"\min({label},{other}) = {label}", rf"x \approx {label}", rf"{label} \approx {label}.0")
    assert not wrongly_scored({label: (right, wrong)})


def test_an_approximation_counts_as_the_value_that_it_follows_where_it_is_true() -> None:
    assert not wrongly_scored(
        {
            r"5\sqrt{2}": ([r"5\sqrt{2} \approx 7.07"], [r"5\sqrt2 \approx 8", r"7.07"]),
            "7.07": ([r"5\sqrt2 \approx 7.07", r"x \approx 7.07"], [r"5\sqrt2", r"6\sqrt2\approx 7.07"]),
            r"\pi": (["3.14159265", r"\pi \approx 3.14"], ["3.14", r"\pi\approx 3.2"]),
        }
    )


@pytest.mark.parametrize(
    ("response", "answer", "other"),
    [
        ("The answer is 8. No wait, the answer is 9.", "9", "8"),
        ("The answer is 8. Actually, it is 9.", "9", "8"),
        ("Answer: 8\nSorry, that is wrong. The answer is 9.", "9", "8"),
        ("First I thought the answer is 8, but the answer is 9.", "9", "8"),
        ("The answer is $8$. No, the answer is $9$.", "9", "8"),
        ("The answer is 9, not 8.", "9", "8"),
        ("The answer is not 8 but 9.", "9", "8"),
        ("The answer is 9. The answer is not 8.", "9", "8"),
        ("The answer is 9. Let me check: 8 + 1 = 9.", "9", "8"),
    ],
)
def test_the_last_answer_that_a_response_gives_counts(response: str, answer: str, other: str) -> None:
    assert (paid(response, answer), paid(response, other)) == (True, False)


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("The answer is at least 12.", "12"),
        ("The number of ways is more than 12", "12"),
        ("So there are not 12 of them", "12"),
        ("The answer is 12 or more.", "12"),
        ("So it must be 12 or 13", "13"),
        ("I think that it is not even.", "even"),
        ("It is either odd or even", "even"),
    ],
)
def test_what_a_sentence_denies_or_bounds_is_not_its_answer(response: str, label: str) -> None:
    assert not paid(response, label)


def test_expressions_are_the_same_where_their_values_are() -> None:
    assert not wrongly_scored(
        {
            r"\frac{3}{\sqrt n}": (
                [r"3\sqrt{1/n}", r"3n^{-1/2}", r"\frac{3\sqrt n}{n}"],
                [r"\frac{3}{\sqrt m}", r"3\sqrt n"],
            ),
            "|x|": ([r"\sqrt{x^2}", "|-x|"], ["x", "-x"]),
            r"\frac{k(k-1)}{2}": ([r"\binom{k}{2}", r"\frac{k^2-k}{2}"], [r"\binom{k+1}{2}", r"\sum_{j=1}^{k-1} j"]),
            r"\frac12": ([r"\sin 30^\circ", r"\cos 60^\circ", "½"], [r"\sin 30", r"\cos 30^\circ"]),
            r"\sqrt{15}": ([r"\sqrt15", r"\sqrt 15", "√15", r"\sqrt{3}\sqrt{5}"], ["5", r"\sqrt{1}5", "3.87"]),
            r"\frac{1\pm\sqrt{13}}{2}": ([r"\frac{1+\sqrt{13}}{2},\frac{1-\sqrt{13}}{2}"], [r"\frac{1+\sqrt{13}}{2}"]),
            "3:4:5": (["6:8:10"], ["5:4:3", r"\frac{3}{20}"]),
            "-2<x<5": (["5>x>-2", "(-2,5)"], ["5>x", "5>x\\ge-2"]),
            r"40\%": (["0.4", r"\frac25", "40 percent"], ["0.04", "4"]),
        }
    )


@pytest.mark.parametrize(
    "bomb",
    [
        *(
            "(2^{9999}+1)^{9999}",
            "((9!)!)!",
            "(10^{9999})^{9}",
            r"\binom{10^9}{10^8}",
            "x^{9999}y^{9999}+(x+y)^{9999}",
            "2^{9^{9}}",
        ),
        *(
            r"\sqrt{9000!}+\sqrt{2}",
            r"(1+i)^{9999}",
            "9^{999}" * 30,
            "+".join(["5 or more"] * 200),
            "Answer: 6. No " * 300,
        ),
    ],
)
def test_no_answer_holds_a_worker(bomb: str) -> None:
    with cpu_limit(2.0):
        assert not paid(rf"\boxed{{{bomb}}}", "5")
    with cpu_limit(2.0):
        assert not paid(bomb, r"\sqrt{2}")


def test_dapo_and_deepscaler_read_the_same_answers_as_math() -> None:
    def by_dapo(response: str, label: str) -> float:
        return dict(dapo.score(ScoreItem("1", "", response, label)))["acc"]  # type: ignore[arg-type]

    assert by_dapo("Answer: 5. No wait, Answer: 6", "6") == 1.0
    assert by_dapo("Answer: 5. No wait, Answer: 6", "5") == 0.0
    for answer, label, right in (
        (r"7\mathrm{i}", "7", 0),
        ("2 million", "2000000", 1),
        ("8 or more", "8", 0),
        ("4+3 i", "4+3i", 1),
    ):
        assert by_dapo(f"Answer: {answer}", label) == right
        assert deepscaler.score(ScoreItem("1", "", rf"</think>\boxed{{{answer}}}", label)) == right
