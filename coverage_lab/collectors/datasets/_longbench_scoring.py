"""How LongBench scores its tasks, and how long its answers may be."""

from collections.abc import Callable

from coverage_lab.collectors.metrics.code import code_similarity
from coverage_lab.collectors.metrics.labels import classification, counting, retrieval
from coverage_lab.collectors.metrics.overlap import qa_f1, qa_f1_zh
from coverage_lab.collectors.metrics.rouge import rouge_l, rouge_l_zh

Metric = Callable[[str, str], float]

METRICS: dict[str, Metric] = {
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1
    ),
    "multifieldqa_zh": qa_f1_zh,
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), rouge_l_zh),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    "passage_count": counting,
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
}

# Their labels come with every row.
CLASSIFICATION = frozenset({"trec", "lsht"})

# Few-shot tasks, whose models go on with a next example: the first line is the answer.
FIRST_LINE = frozenset({"trec", "triviaqa", "samsum", "lsht"})

ANSWER_TOKENS: dict[str, int] = {
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
    **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), 32),
    **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
    **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
}


def score(task: str, prediction: str, answers: tuple[str, ...], labels: tuple[str, ...]) -> float:
    """Return the score of an answer against the reference that it fits best."""
    if task in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if task in CLASSIFICATION:
        return max(classification(prediction, answer, labels) for answer in answers)
    return max(METRICS[task](prediction, answer) for answer in answers)


def fault(task: str, answers: tuple[str, ...], labels: tuple[str, ...]) -> str | None:
    """Return why no answer to a row could be right, or None."""
    if not answers:
        return "no answers"
    if task in CLASSIFICATION and not labels:
        return "no labels in 'all_classes'"
    told = task in CLASSIFICATION or METRICS[task] in (retrieval, counting)
    if told and score(task, answers[0], answers, labels) < 1:
        return f"{answers[0]!r} is no answer that {task} can have"
    return None
