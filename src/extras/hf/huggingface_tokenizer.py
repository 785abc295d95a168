"""Reads tokenizers of Hugging Face model folders: tokenizer.json, the files beside it, and the chat template."""

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

# Threads are the loader's: the package is to start none of its own, nor to complain of processes started after that.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# transformers' classes that build normalizer and pre-tokenizer by themselves -> CRC-32 of what they build, as JSON.
BUILT_BY_CLASS = {
    **{"LlamaTokenizer": 2368733425, "GemmaTokenizer": 2427428179, "Qwen2Tokenizer": 2791178372},
    **{"GPT2Tokenizer": 138731014, "CohereTokenizer": 1446254178, "GPTNeoXTokenizer": 2004846466},
}

# The files that name special tokens, in order of precedence: by their text, then by their ids.
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_ID_FILES = ("generation_config.json", "config.json")


class HuggingFaceTokenizer(Tokenizer):
    """Reads a tokenizer.json by the `tokenizers` package.

    bos and eos are, in this order, what tokenizer_config.json, special_tokens_map.json, generation_config.json and
    config.json beside it say; a null is passed over. A tokenizer without bos starts documents with its eos. The bos
    that a post-processor would add is left out, so that there is never a second one. Special tokens that a text spells
    out are read as such, because chat templates write them; a text's own bos and eos are not doubled. Added tokens at
    or beyond `model_vocab_size` are an error where a text has one, not before: Gemma 3 lists an image token that its
    text models have no weights for.
    Raises UserError where the file is no tokenizer, or no eos is named.
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
        # The texts of bos_token, eos_token, unk_token and so on, and the ids; the first file takes precedence.
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
                    f"tokenizer_path: a file beside {file} has {key} {given}: expected an id, or a list of ids"
                )
        eos = self._special_id("eos", tokens, ids)
        if eos is None:
            raise UserError(
                f"tokenizer_path: no file beside {file} names its eos token, so documents can't be told apart: give "
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
        templates = self.chat_template, self.tool_template
        self._template = ChatTemplate(*templates, tokens, str(template_file)) if self.chat_template else None

    def encode(self, text: str) -> np.ndarray:
        ids = self.encode_prompt(text)
        return ids if self.rules > 1 < len(ids) and ids[-1] == self.eos else np.append(ids, np.int32(self.eos))

    def encode_prompt(self, text: str) -> np.ndarray:
        ids = self._ids(text)
        return self._array(ids if self.rules > 1 and ids[:1] == [self.bos] else [self.bos, *ids])

    def encode_default(self, text: str) -> np.ndarray:
        """Returns `encode_prompt` if tokenizer.json's post-processor adds bos, else `encode_text`."""
        return self.encode_prompt(text) if self.adds_bos else self.encode_text(text)

    def encode_text(self, text: str) -> np.ndarray:
        return self._array(self._ids(text))

    def encode_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns `encode_text`, and int [n, 2]: where in the text the characters of each id begin and end."""
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
        # The same as by its `encode`, which would let no other thread run meanwhile and work out spans too.
        return self._encoded(lambda: self._backend.encode_batch_fast([text])[0].ids)

    @property
    def _backend(self) -> tokenizers.Tokenizer:
        return self._of_rules[self.rules]

    def _encoded(self, encode: Callable[[], Any]) -> Any:
        try:
            return encode()
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, no Exception
                raise
            raise UserError(
                f"{self._file} has no ids for a text: {error}. If an unknown token is missing, give its model one"
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
            raise UserError(f"tokenizer_path: {self._file} has no token {token!r}, which is said to be its {kind}")
        return token_id


def added_tokens(
    entries: dict[str, Any], named: dict[str, str], tokenizer: tokenizers.Tokenizer
) -> list[tokenizers.AddedToken]:
    """Returns the tokens of tokenizer_config.json that tokenizer.json does not list as added: transformers adds them.

    First come those of `added_tokens_decoder` by their ids, then `named` ones such as eos, then the further special
    tokens.
    """
    listed = entries.get("added_tokens_decoder") or {}
    decoder = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    further = entries.get("additional_special_tokens") or entries.get("extra_special_tokens") or ()
    further = further.values() if isinstance(further, dict) else further
    found = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    added = []
    for token in [*decoder, *named.values(), *further]:
        facts = {"content": token, "special": True} if isinstance(token, str) else dict(token)
        if facts["content"] not in found:
            found.add(facts["content"])
            facts.pop("__type", None)
            facts["special"] = facts.get("special", True) or facts["content"] in named.values()
            added.append(tokenizers.AddedToken(**facts))
    return added


def class_caveat(entries: dict[str, Any], tokenizer: tokenizers.Tokenizer) -> str:
    """Returns a sentence if transformers may build what precedes the vocabulary otherwise than tokenizer.json says."""
    name = str(entries.get("tokenizer_class") or "").removesuffix("Fast")
    steps = [
        json.loads(step.__getstate__()) if step else None for step in (tokenizer.normalizer, tokenizer.pre_tokenizer)
    ]
    same = BUILT_BY_CLASS.get(name) == zlib.crc32(json.dumps(steps, sort_keys=True).encode())
    unset = (None,) if name == "LlamaTokenizer" else (None, False)  # which takes false for another prefix
    if name in ("", "PreTrainedTokenizer", "TokenizersBackend") or (same and entries.get("add_prefix_space") in unset):
        return ""
    return f"transformers builds {name} not by tokenizer.json alone, and its ids may differ: src.convert check compares"


def _chat_templates(folder: Path, named: dict[str, dict[str, Any]]) -> tuple[Path, str | None, str | None]:
    """Reads the template, and the one for tools: chat_template.jinja, or else tokenizer_config.json's, and its file."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        files = file, folder / "additional_chat_templates" / "tool_use.jinja"
        try:
            return file, *(each.read_text(encoding="utf-8") if each.is_file() else None for each in files)
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is no chat template: it is not UTF-8 ({error.reason})") from None
    file = folder / "tokenizer_config.json"
    templates = {"default": named["tokenizer_config.json"].get("chat_template")}
    if isinstance(several := templates["default"], list) and all(isinstance(each, dict) for each in several):
        templates = {each.get("name"): each.get("template") for each in several}
    of_tools = templates.get("default"), templates.get("tool_use")
    if not all(isinstance(template, str | None) for template in of_tools):
        raise UserError(f'{file}: "chat_template" is neither a text nor a list of {{"name": ..., "template": ...}}')
    return file, *of_tools
