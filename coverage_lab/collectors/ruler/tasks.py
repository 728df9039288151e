"""RULER's 13 tasks: its published parameters (scripts/synthetic.yaml)."""

from coverage_lab.collectors.ruler.chains import VariableChains
from coverage_lab.collectors.ruler.common_words import CommonWords
from coverage_lab.collectors.ruler.draft import Task
from coverage_lab.collectors.ruler.frequent_words import FrequentWords
from coverage_lab.collectors.ruler.needles import Needles
from coverage_lab.collectors.ruler.questions import Questions

TASKS: dict[str, Task] = {
    "niah_single_1": Needles(haystack="noise"),
    "niah_single_2": Needles(haystack="essay"),
    "niah_single_3": Needles(haystack="essay", values="uuids"),
    "niah_multikey_1": Needles(haystack="essay", num_keys=4),
    "niah_multikey_2": Needles(haystack="needle"),
    "niah_multikey_3": Needles(haystack="needle", keys="uuids", values="uuids"),
    "niah_multivalue": Needles(haystack="essay", num_values=4),
    "niah_multiquery": Needles(haystack="essay", num_queries=4),
    "vt": VariableChains(chains=1, hops=4),
    "cwe": CommonWords(common=10, times=30, other_times=3),
    "fwe": FrequentWords(alpha=2.0),
    "qa_1": Questions(data="squad"),
    "qa_2": Questions(data="hotpotqa"),
}
