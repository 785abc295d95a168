"""Reads the tokenizers of Hugging Face model folders: tokenizer.json, related files, and the chat template."""

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from src.data.types import Fingerprint, Message, Shown, Tokenizer, missing_template
from src.extras.hf.untrusted import ChatTemplate, try_tokenizer
from src.system.errors import UserError
from src.system.json_text import read_object, well_formed
from src.system.storage_errors import one_line

# Disable the tokenizers package's threads and its warning about forks; the loader has its own threads.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# transformers' classes that construct normalizer and pre-tokenizer themselves -> CRC-32 of these, as JSON.
BUILT_BY_CLASS = {
    **{"LlamaTokenizer": 2368733425, "GemmaTokenizer": 2427428179, "Qwen2Tokenizer": 2791178372},
    **{"GPT2Tokenizer": 138731014, "CohereTokenizer": 1446254178, "GPTNeoXTokenizer": 2004846466},
}

# The files that name special tokens, by precedence: by text, then by id.
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")


class HuggingFaceTokenizer(Tokenizer):
    """Tokenizes with a tokenizer.json, by the `tokenizers` package.

    bos and eos are taken from the first of tokenizer_config.json, special_tokens_map.json, generation_config.json and
    config.json in the same folder that has a non-null entry. Without bos, documents start with eos. A post-processor's
    bos is removed, so that there is never a second one. Special tokens spelled in a text are parsed as special tokens,
    because chat templates write them; a text's own bos and eos are not doubled (data rules of version 1 double them).
    Added tokens at or beyond `model_vocab_size` only fail when a text contains one: Gemma 3 lists an image token for
    which its text models have no weights. Raises UserError if the file is not a tokenizer, if no file names eos, or if
    one of the files is malformed.
    """

    def __init__(self, file: Path, model_vocab_size: int) -> None:
        data = file.read_bytes()
        self._digest = hashlib.sha256(data).hexdigest()[:16]
        try_tokenizer(file, self._digest)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except ValueError as error:
            raise UserError(f"tokenizer_path: {file} can't be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        by_default = self._tokenizer.encode("").ids
        self._tokenizer.post_processor = None  # it would add bos, and leave spaces out of the spans
        self._file = file
        self._model_vocab_size = model_vocab_size
        beside = [file.parent / name for name in (*_TOKEN_FILES, *_ID_FILES)]
        named = {path.name: read_object(path) if path.is_file() else {} for path in beside}
        # The texts of bos_token, eos_token, unk_token etc., and the ids; the first file takes precedence.
        tokens = {
            key: well_formed(text)
            for name in reversed(_TOKEN_FILES)
            for key, value in named[name].items()
            if key.endswith("_token")
            and isinstance(text := value.get("content") if isinstance(value, dict) else value, str)
        }
        ids = {
            key: value if isinstance(value, list) else [value]
            for name in reversed(_ID_FILES)
            for key, value in named[name].items()
            if key.endswith("_token_id") and value is not None
        }
        for key, given in ids.items():
            if not all(type(token_id) is int and token_id >= 0 for token_id in given):
                raise UserError(
                    f"tokenizer_path: a file next to {file} has {key} {given}: expected an id, or a list of ids"
                )
        eos = self._special_id("eos", tokens, ids)
        if eos is None:
            raise UserError(
                f"tokenizer_path: no file next to {file} names its eos token, which separates documents: give "
                f'"eos_token" in {file.parent / _TOKEN_FILES[0]}'
            )
        bos = self._special_id("bos", tokens, ids)
        self.eos: int = eos
        self.bos: int = eos if bos is None else bos
        self.adds_bos = by_default[:1] == [self.bos]
        self.stop_ids = frozenset({eos, *ids.get("eos_token_id", ())})
        words = self._tokenizer.get_vocab(with_added_tokens=False).values()
        self.vocab_size: int = max(*words, self.bos, *self.stop_ids) + 1
        self._of_rules = {1: self._tokenizer, 2: self._tokenizer}
        try:
            added = added_tokens(named["tokenizer_config.json"], tokens, self._tokenizer)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            problem = f"its added or special tokens can't be read: {one_line(error)}"
            raise UserError(f"tokenizer_path: {beside[0]}: {problem}") from None
        splits = bool(named["tokenizer_config.json"].get("split_special_tokens"))
        if added or splits:
            self._of_rules[2] = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
            self._of_rules[2].add_tokens(added)
            self._of_rules[2].encode_special_tokens = splits
        self._changes = repr(added) if self._of_rules[2] is not self._tokenizer else ""
        self.caveat = class_caveat(named["tokenizer_config.json"], self._tokenizer)
        template_file, self.chat_template, self.tool_template = _chat_templates(file.parent, named)
        self._template = None
        if self.chat_template:
            self._template = ChatTemplate(self.chat_template, self.tool_template, tokens, str(template_file))

    def encode(self, text: str) -> np.ndarray:
        ids = self.encode_prompt(text)
        return ids if self.rules > 1 < len(ids) and ids[-1] == self.eos else np.append(ids, np.int32(self.eos))

    def encode_prompt(self, text: str) -> np.ndarray:
        ids = self._ids(text)
        return self._array(ids if self.rules > 1 and ids[:1] == [self.bos] else [self.bos, *ids])

    def encode_default(self, text: str) -> np.ndarray:
        """Encodes with bos if tokenizer.json's post-processor adds it, else without."""
        return self.encode_prompt(text) if self.adds_bos else self.encode_text(text)

    def encode_text(self, text: str) -> np.ndarray:
        return self._array(self._ids(text))

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns `encode_text`, and int [n, 2]: where each id's characters begin and end in the text."""
        encoding = self._encoded(lambda: self._backend.encode(text))
        return self._array(encoding.ids), np.array(encoding.offsets).reshape(-1, 2)

    def byte_ends(self, text: str) -> np.ndarray:
        code_points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + sum((code_points >= least).astype(np.int64) for least in (0x80, 0x800, 0x10000))
        return np.concatenate([[0], np.cumsum(sizes)])[self.encode_with_spans(text)[1][:, 1]]

    def decode(self, ids: np.ndarray) -> str:
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=True)

    def decode_spelled(self, ids: np.ndarray) -> str:
        return self._backend.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def render_parts(
        self, messages: Sequence[Message], parts: Sequence[tuple[int, bool]], shown: Shown = None
    ) -> list[str]:
        if self._template is None:
            raise missing_template()
        return self._template.render(messages, parts, shown)

    def fingerprint(self) -> Fingerprint:
        ids = {"vocab_size": self.vocab_size, "bos": self.bos, "eos": self.eos}
        changes = hashlib.sha256(self._changes.encode()).hexdigest()[:16] if self._changes and self.rules > 1 else ""
        return {"type": "huggingface", **ids, "digest": self._digest} | ({"added": changes} if changes else {})

    def _ids(self, text: str) -> list[int]:
        # The package's `encode` gives the same ids, but would block other threads, and compute spans too.
        return self._encoded(lambda: self._backend.encode_batch_fast([text])[0].ids)

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        return self._of_rules[self.rules]

    def _encoded(self, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except BaseException as error:
            # Not only Exception, because a panic of the package's Rust code is not one.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(
                f"{self._file} can't tokenize a text: {error}. If its unknown token is missing, add one to its model"
            ) from None

    def _array(self, ids: list[int]) -> np.ndarray:
        array = np.array(ids, np.int32)
        if len(array) and (highest := int(array.max())) >= self._model_vocab_size:
            raise UserError(
                f"a text has the token {self._backend.id_to_token(highest)!r}, id {highest} of {self._file}, which "
                f"vocab_size={self._model_vocab_size} does not have: set vocab_size to the model's, "
                f"{highest + 1} or more if it has this token"
            )
        return array

    def _special_id(self, kind: str, tokens: dict[str, str], ids: dict[str, list[int]]) -> int | None:
        if (token := tokens.get(f"{kind}_token")) is None:
            return next(iter(ids.get(f"{kind}_token_id", ())), None)
        if (token_id := self._tokenizer.token_to_id(token)) is None:
            raise UserError(f"tokenizer_path: {self._file} has no token {token!r}, which a file names as its {kind}")
        return token_id


def added_tokens(
    entries: dict[str, Any], named: dict[str, str], tokenizer: tokenizers.Tokenizer
) -> list[tokenizers.AddedToken]:
    """Returns the added tokens that are only in tokenizer_config.json, which transformers adds to tokenizer.json's.

    First come the entries of `added_tokens_decoder` by id, then `named` ones such as eos, then the remaining special
    tokens.
    """
    listed = entries.get("added_tokens_decoder") or {}
    decoder = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    further = entries.get("additional_special_tokens") or entries.get("extra_special_tokens") or ()
    further = further.values() if isinstance(further, dict) else further
    found = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = []
    for token in [*decoder, *named.values(), *further]:
        fields: dict[str, Any] = {"content": token, "special": True} if isinstance(token, str) else dict(token)
        if fields["content"] not in found:
            found.add(fields["content"])
            fields.pop("__type", None)
            fields["special"] = fields.get("special", True) or fields["content"] in named.values()
            added.append(tokenizers.AddedToken(**fields))
    return added


def class_caveat(entries: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> str:
    """Warns, in a sentence, if transformers may tokenize differently than tokenizer.json says; else ""."""
    name = str(entries.get("tokenizer_class") or "").removesuffix("Fast")
    steps = [
        json.loads(step.__getstate__()) if step else None for step in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    ]
    same = BUILT_BY_CLASS.get(name) == zlib.crc32(json.dumps(steps, sort_keys=True).encode())
    unset = (None,) if name == "LlamaTokenizer" else (None, False)  # for LlamaTokenizer, false selects another prefix
    if name in ("", "PreTrainedTokenizer", "TokenizersBackend") or (same and entries.get("add_prefix_space") in unset):
        return ""
    return f"transformers builds {name} not only from tokenizer.json, so ids may differ: compare with src.convert check"


def _chat_templates(folder: Path, named: dict[str, dict[str, Any]]) -> tuple[Path, str | None, str | None]:
    """Reads the chat templates from chat_template.jinja or tokenizer_config.json; raises UserError if malformed.

    Returns the file, the general template, and the one for conversations with tools (None: no such template).
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        files = file, folder / "additional_chat_templates" / "tool_use.jinja"
        try:
            general, tools = (each.read_text(encoding="utf-8") if each.is_file() else None for each in files)
            return file, general, tools
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not a chat template: it is not UTF-8 ({error.reason})") from None
    file = folder / "tokenizer_config.json"
    templates = {"default": named["tokenizer_config.json"].get("chat_template")}
    several = templates["default"]
    if isinstance(several, list) and all(isinstance(each, dict) and type(each.get("name")) is str for each in several):
        templates = {each["name"]: each.get("template") for each in several}
    of_tools = templates.get("default"), templates.get("tool_use")
    if not all(isinstance(template, str | None) for template in of_tools):
        raise UserError(f'{file}: "chat_template" is neither a text nor a list of {{"name": ..., "template": ...}}')
    return file, *of_tools
