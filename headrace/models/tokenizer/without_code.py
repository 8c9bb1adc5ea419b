"""`python -m headrace.models.tokenizer.without_code MODEL FOLDER`: the same model, whose tokenizer needs no code.

For folders with a tiktoken.model and the code that reads it, as Kimi K2 and Moonlight are published. That code is read
and not run: the pattern that cuts a text into words is a constant in it. The new folder has a tokenizer.json of that
pattern and vocabulary; weights and all else are links to the model's files.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import AlreadyExists, ConfigError
from headrace.models.folders import main_of
from headrace.models.tokenizer.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, RemoteCode, parsed, read_json

VOCABULARY = "tiktoken.model"
_PATTERN = "pat_str"


def write_without_code(model: Path, folder: Path) -> int:
    """Returns the number of tokens. Raises AlreadyExists, and ConfigError for a model of another kind."""
    if folder.exists():
        raise AlreadyExists(f"{folder} exists already: name a new folder")
    code = RemoteCode.of(model)
    if not code.tokenizer or not (model / VOCABULARY).is_file():
        raise ConfigError(
            f"{model} has no {VOCABULARY} with code that reads it: only such a folder can be written without code",
            field="hf_checkpoint",
        )
    config, about = dict(read_json(model / "config.json")), dict(read_json(model / TOKENIZER_CONFIG))
    ranks = _ranks(model / VOCABULARY)
    names = _special_tokens(about, len(ranks), int(config.get("vocab_size") or 0))
    tokenizer = _tokenizer(ranks, _pattern(code), names)
    for each in (config, about):
        each.pop("auto_map", None)
    about["tokenizer_class"] = "PreTrainedTokenizerFast"
    folder.mkdir(parents=True)
    written = {"config.json": config, TOKENIZER_CONFIG: about}
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    tokenizer.save(str(folder / TOKENIZER_JSON))
    for path in sorted(model.iterdir()):
        if path.is_file() and path.suffix != ".py" and path.name not in (*written, VOCABULARY, TOKENIZER_JSON):
            (folder / path.name).symlink_to(path.resolve())
    return int(tokenizer.get_vocab_size())


def _ranks(path: Path) -> dict[bytes, int]:
    """The vocabulary: a line is the token's bytes in base64, a space and its id."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(f"{path}, line {number}: not a token in base64 and its id: {error}") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ConfigError(f"{path}: its {len(ranks):,} tokens are not numbered from 0 with every byte among them")
    return ranks


def _special_tokens(about: Mapping[str, Any], base: int, vocab_size: int) -> list[str]:
    """Names of the ids behind the vocabulary, up to the model's last; those without a name are reserved."""
    named = {int(number): str(token["content"]) for number, token in (about.get("added_tokens_decoder") or {}).items()}
    if wrong := sorted(number for number in named if number < base):
        raise ConfigError(f"added_tokens_decoder names id {wrong[0]}, which is in the vocabulary of {base:,}")
    end = max([vocab_size, base, *(number + 1 for number in named)])
    return [named.get(number, f"<|reserved_token_{number}|>") for number in range(base, end)]


def _pattern(code: RemoteCode) -> str:
    """The class's `pat_str`: a string, or strings that are joined."""
    for name in code.tokenizer:
        for node in ast.walk(parsed(code.folder / name)):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == _PATTERN for t in node.targets):
                return _text(node.value, code.folder / name)
    raise ConfigError(f"{code.folder}: {', '.join(code.tokenizer)} has no {_PATTERN}: it is no tokenizer of tiktoken's")


def _text(node: ast.expr, path: Path) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[parts]):
            try:
                return between.join(ast.literal_eval(parts))
            except (ValueError, TypeError):
                pass
    raise ConfigError(f"{path}, line {node.lineno}: {_PATTERN} is not a constant, which could be read without running")


def _tokenizer(ranks: Mapping[bytes, int], pattern: str, special: list[str]) -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    converter = TikTokenConverter(vocab_file=VOCABULARY, pattern=pattern, extra_special_tokens=special)
    # tiktoken's own reader copies each file to a cache that goes by the path alone.
    converter.load_tiktoken_bpe = lambda _: ranks
    return converter.converted()


def main() -> int:
    """Returns the exit code."""
    what = f"a Hugging Face folder with a {VOCABULARY}"
    return main_of("headrace.models.tokenizer.without_code", __doc__, what, _written)


def _written(model: Path, folder: Path) -> str:
    num_tokens = write_without_code(model, folder)
    return f"{TOKENIZER_JSON} of {num_tokens:,} tokens; weights are links to {model}"


if __name__ == "__main__":
    sys.exit(main())
