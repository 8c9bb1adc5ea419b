"""Transformers' tokenizer of a checkpoint. Code that the folder brings runs only where the job trusts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.errors import ConfigError
from headrace.models.tokenizer.remote_code import RemoteCode


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Takes seconds. Raises ConfigError when there is no tokenizer, when its code is not trusted, or when it fails."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds: only for those who tokenize

    code = RemoteCode.of(folder)
    code.require(trusted=trust_remote_code)
    try:
        if code.tokenizer and not trust_remote_code:
            return PreTrainedTokenizerFast.from_pretrained(str(folder))
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:
        if code.tokenizer and trust_remote_code:  # it is user code, and may raise anything
            raise ConfigError(_of_code(code, error), field="trust_remote_code") from error
        if not isinstance(error, OSError | ValueError):
            raise
        raise ConfigError(
            f"no tokenizer in {folder}: {_first_line(error)}: give a Hugging Face folder", field="hf_checkpoint"
        ) from error


def load_processor(folder: Path, *, trust_remote_code: bool) -> Any:
    """Transformers' processor of text and images. Takes seconds."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(folder), trust_remote_code=trust_remote_code)


def _of_code(code: RemoteCode, error: Exception) -> str:
    from transformers import __version__

    return (
        f"{code.folder}: its own code ({', '.join(code.tokenizer)}) fails with transformers {__version__}: "
        f"{type(error).__name__}: {_first_line(error)}: take a newer revision of the model, or write a folder without "
        f"code: python -m headrace.models.tokenizer.without_code {code.folder} FOLDER"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
