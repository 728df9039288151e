"""A model's tokenizer without its weights."""

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from coverage_lab.collectors import models


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Parameters
    ----------
    name : str
        What `load_model` takes.

    Raises
    ------
    CoverageLabError
        If there is no such model.
    """
    source = models._locate(name)
    with models._quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = models._from_pretrained(AutoTokenizer, source, name)
    return tokenizer
