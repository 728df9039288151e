"""Scores by hand, from other programs, and against the rules written out plainly."""

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coverage_lab.collectors.metrics.chinese import bare, segments
from coverage_lab.collectors.metrics.choice import chosen
from coverage_lab.collectors.metrics.code import code_similarity
from coverage_lab.collectors.metrics.containment import cleaned, contained
from coverage_lab.collectors.metrics.integers import final_integer
from coverage_lab.collectors.metrics.labels import classification, counting, retrieval
from coverage_lab.collectors.metrics.overlap import f1, qa_f1, qa_f1_zh
from coverage_lab.collectors.metrics.rouge import rouge_l, rouge_l_zh

LETTERS = st.lists(st.sampled_from("abcd"), max_size=7)
SENTENCES = st.lists(st.sampled_from(["a", "b", "c", "d", "."]), max_size=12).map(" ".join)


class TestContained:
    def test_by_hand(self):
        assert contained("One, TWO", ["two", "one", "six"], "all") == pytest.approx(2 / 3)
        assert contained("One, TWO", ["six", "two"], "any") == 1
        assert contained("", ["a"], "any") == contained("a", [], "all") == 0
        assert cleaned(" \x01a\tb\x1f ") == "a\nb"

    @given(texts=st.lists(st.text(max_size=5), min_size=1, max_size=4), rest=st.text(max_size=9))
    def test_a_text_of_all_the_references_holds_them(self, texts: list[str], rest: str):
        assert contained(rest + "|".join(texts), texts, "all") == 1
        assert contained(rest + texts[-1], texts, "any") == 1


class TestF1:
    @pytest.mark.parametrize(
        ("prediction", "reference", "score"),
        [
            ("The cat, sat!", "a cat sat", 1),
            ("the red cat", "a cat", 2 / 3),  # red, cat; cat: 1/2 and 1
            ("cat cat dog", "cat dog dog", 2 / 3),  # cat and dog once each, of three
            ("theatre", "the theatre", 1),
            ("", "cat", 0),
            ("the", "the", 0),  # nothing is left of either
            ("O'Neil", "oneil", 1),
        ],
    )
    def test_by_hand(self, prediction: str, reference: str, score: float):
        assert qa_f1(prediction, reference) == pytest.approx(score)

    @given(a=LETTERS, b=LETTERS)
    def test_the_rule(self, a: list[str], b: list[str]):
        left, same = list(b), 0
        for item in a:
            if item in left:
                left.remove(item)
                same += 1
        if not same:
            assert f1(a, b) == 0
            return
        precision, recall = same / len(a), same / len(b)
        assert f1(a, b) == pytest.approx(2 * precision * recall / (precision + recall))

    def test_chinese(self):
        assert segments("归还 1.12万户。ABC公司x2") == [*"归还", "1.12", *"万户。", "ABC", *"公司", "x2"]
        assert segments("カタ、한국") == ["カ", "タ", "、", "한국"]
        assert bare(segments("《ABC》，是+的。")) == ["abc", "是", "的"]
        assert qa_f1_zh("归还本金。", "归还利息") == 0.5
        assert qa_f1_zh("他在 北京", "在北京。") == pytest.approx(6 / 7)


class TestRouge:
    @pytest.mark.parametrize(
        ("prediction", "reference", "score"),
        [
            # What rouge 1.0.1 prints.
            ("The cat sat on the mat. The dog ran away.", "A dog ran away. The cat sat.", 0.7499999950781251),
            ("the the the cat", "the cat the", 0.4999999950000001),
            ("One. Two. ", "Two. One. ", 0.999999995),
            ("a b c d e", "e d c b a", 0.19999999500000015),
            # By hand: of 2 and 4 different words 2 are common.
            ("a b", "a x y b", 2 / 3),
            ("", "a", 0),
            ("...", "a", 0),
        ],
    )
    def test_golden(self, prediction: str, reference: str, score: float):
        assert rouge_l(prediction, reference) == pytest.approx(score, abs=1e-8)

    def test_chinese_is_by_characters(self):
        assert rouge_l_zh("小猫坐着", "小狗坐着") == pytest.approx(0.75, abs=1e-7)

    def test_long_sentences_are_scored(self):
        words = " ".join(map(str, range(1500)))
        assert rouge_l(words, words) == pytest.approx(1, abs=1e-7)

    @given(prediction=SENTENCES, reference=SENTENCES)
    def test_the_rule(self, prediction: str, reference: str):
        """The union over pairs of sentences of a longest common subsequence, found by recursion."""

        @cache
        def length(a: Sequence[str], b: Sequence[str]) -> int:
            if not a or not b:
                return 0
            return 1 + length(a[:-1], b[:-1]) if a[-1] == b[-1] else max(length(a[:-1], b), length(a, b[:-1]))

        def subsequence(a: Sequence[str], b: Sequence[str]) -> set[str]:
            if not a or not b:
                return set()
            if a[-1] == b[-1]:
                return {a[-1]} | subsequence(a[:-1], b[:-1])
            return subsequence(a[:-1], b) if length(a[:-1], b) > length(a, b[:-1]) else subsequence(a, b[:-1])

        said, wanted = (
            [tuple(" ".join(part.split()).split(" ")) for part in text.split(".") if part]
            for text in (prediction, reference)
        )
        if not said or not wanted:
            assert rouge_l(prediction, reference) == 0
            return
        common = set().union(*(subsequence(a, b) for a, b in itertools.product(wanted, said)))
        recall = len(common) / len(set().union(*wanted))
        precision = len(common) / len(set().union(*said))
        expected = 2 * recall * precision / (recall + precision) if common else 0
        assert rouge_l(prediction, reference) == pytest.approx(expected, abs=1e-7)

    @given(text=SENTENCES)
    def test_a_text_is_like_itself(self, text: str):
        assert rouge_l(text, text) == pytest.approx(1 if text.strip(". ") else rouge_l(text, text), abs=1e-7)


class TestLabels:
    LABELS = ("City", "State", "Other location", "Country", "Other")

    @pytest.mark.parametrize(
        ("prediction", "reference", "score"),
        [
            ("City", "City", 1),
            ("a City or a State", "City", 1 / 2),
            ("Other location", "Other location", 1),  # "Other" is part of it
            ("Other location", "Other", 1 / 2),
            ("city", "City", 0),
            ("State", "City", 0),
            ("City, State, Country", "City", 1 / 3),
            ("City", "Town", 0),
        ],
    )
    def test_classification(self, prediction: str, reference: str, score: float):
        assert classification(prediction, reference, self.LABELS) == score

    def test_counting(self):
        assert counting("17", "17") == counting("It is 17.", "17") == 1
        assert counting("17 of 30, so 17", "17") == 2 / 3
        assert counting("seventeen", "17") == counting("117", "17") == 0

    def test_retrieval(self):
        assert retrieval("Paragraph 7", "Paragraph 7") == retrieval("7", "Paragraph 7") == 1
        assert retrieval("Paragraph 7 or 17", "Paragraph 7") == 1 / 2
        assert retrieval("是段落12", "段落12") == 1
        assert retrieval("none", "段落12") == retrieval("7", "seven") == 0


class TestCode:
    @pytest.mark.parametrize(
        ("prediction", "reference", "score"),
        [
            # What fuzzywuzzy 0.18.0 gives without python-Levenshtein, for the first line that counts.
            ("x = foo(1)\nz = 2", "y = foo(2)", 0.8),
            ("# c\nreturn self.x", "return self.y", 0.92),
            ("\n\n```python\nfor i in range(3):", "for j in range(4):", 0.89),
            ("abc", "xyz", 0),
            ("// only\n# comments", "x", 0),
            ("", "", 1),
            ("x", "", 0),
            ("same(line)", "same(line)", 1),
        ],
    )
    def test_golden(self, prediction: str, reference: str, score: float):
        assert code_similarity(prediction, reference) == score


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The correct answer is (C)", "C"),
        ("So. **The correct answer is (B)**, not (A).", "B"),
        ("The correct answer is *D*.", "D"),
        ("The correct answer is A ... The correct answer is (B)", "B"),  # brackets go first
        ("the correct answer is (C)", None),
        ("(C)", None),
        ("The correct answer is (E)", None),
        ("", None),
    ],
)
def test_choice(text: str, letter: str | None):
    assert chosen(text) == letter


class TestFinalInteger:
    @pytest.mark.parametrize(
        ("text", "integer"),
        [
            (r"so \boxed{116}", "116"),
            (r"\boxed{5} no, \boxed{ 080 }. Not 7.", "80"),
            (r"\boxed{\text{116}}", "116"),
            (r"$\boxed{m+n = 116.}$", "116"),
            (r"\boxed{116^\circ}", "116"),
            (r"\boxed{204 \text{ minutes}}", "204"),
            (r"\boxed{116 \text{ or } 117}", None),
            (r"\boxed{\text{none}}", None),
            (r"\boxed{1{,}016}", "1016"),
            (r"\boxed{7.0}", "7"),
            (r"\boxed{\frac{232}{2}}", None),
            (r"\boxed{116 or 117}", None),
            (r"\boxed{-16}", "-16"),
            (r"\boxed{}", None),
            (r"\boxed{12} and then \boxed{116", "12"),  # the last one that is closed
            (r"\boxed{116", "116"),
            ("The answer is 116.", "116"),
            ("3 of 116 is about 2.59", "116"),
            ("10-16", "16"),
            ("it is -16", "-16"),
            ("x = −16", "-16"),
            ("1,016 in all", "1016"),
            ("1,0167", "167"),
            ("007", "7"),
            ("0", "0"),
            ("-0", "0"),
            ("none", None),
            ("", None),
            ("9" * 5000, "9" * 5000),
        ],
    )
    def test_by_hand(self, text: str, integer: str | None):
        assert final_integer(text) == integer

    @given(number=st.integers(0, 999), words=st.text("ab c.\n\\{}", max_size=20))
    def test_both_rules(self, number: int, words: str):
        assert final_integer(f"{words} 5 \\boxed{{{number}}} {words}") == str(number)
        assert final_integer(f"5 {words} {number} {words}") == str(number)

    @given(st.text())
    def test_any_text(self, text: str):
        found = final_integer(text)
        assert found is None or int(found) == int(found.lstrip("+"))
