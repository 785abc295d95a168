"""Finds the settings of a configuration that have no effect. Imported only if `requirements.may_be_unused`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from src.config.dataset_spec import SETTINGS, SHARED
from src.config.requirements import AROUND_LAYERS, REQUIREMENTS, TYPED, Lists, Requires, Setting, unmet
from src.config.schema import KEYS
from src.config.yaml import dump


def keys_not_read(config: Mapping[str, Any], command: str, unread: Sequence[Requires]) -> set[str]:
    """Returns the keys that `command` does not read, given the values of all valid keys, `config`.

    `unread`: as for `unused_keys`.
    """
    others = (key.name for key in KEYS.values() if command and key.commands and command not in key.commands)
    return {*others, *(key for need in unmet(unread, config) for key in need.keys)}


def unused_keys(
    settings: Sequence[Setting],
    config: Mapping[str, Any],
    notes: list[str],
    command: str,
    unread: Sequence[Requires] = (),
) -> list[tuple[str, str]]:
    """Finds a user's settings that differ from the default but have no effect; returns (key, sentence) for each.

    `settings` are in the order in which they apply, and `config` is the result, without invalid keys. Skips keys that a
    source after their own made unused. With a `command`, also finds keys that are for other commands, or that `unread`
    (see `unread_keys.UNREAD`) lists. Settings that may be ignored are listed in `notes` instead.
    """
    last = {setting.key.partition(".")[0]: (number, setting) for number, setting in enumerate(settings)}
    needs, unread = ((*REQUIREMENTS, *unread), ()) if command == "src.train" else (REQUIREMENTS, unread)
    unread = unmet(unread, config)
    not_read = {key for need in unread for key in need.keys}
    needs = [need for need in needs if need.one_of.keys() <= config.keys() - not_read]
    problems: list[tuple[str, str]] = []
    ignored: dict[tuple[str, str], list[str]] = {}  # settings that `notes` lists together, by source and reason

    def report(key: str, typed: str, where: str, reason: str, ignored_where: str) -> None:
        if {"anywhere": True, "in files": where != TYPED, "nowhere": False}[ignored_where]:
            ignored.setdefault((where, reason), []).append(typed)
        else:
            problems.append((key, _no_effect([typed], where, reason)))

    for key, (number, setting) in last.items():
        if key not in config or config[key] == KEYS[key].default:
            continue
        changed = {later.key.partition(".")[0] for later in settings[number:] if later.where != setting.where}
        if found := _of_others(key, command, unread) or _idle(key, config, changed, needs):
            report(key, f"{key}={dump(config[key])}", setting.where, *found)
    for key, place, facts, refused in _listed(config):
        of_entry = unmet(REQUIREMENTS, {**config, **facts})
        for fact, need in ((fact, each) for each in of_entry for fact in each.keys if fact in facts):
            typed = f"{fact}={dump(facts[fact])}".removeprefix("train_").removeprefix("eval_")  # as an entry spells it
            ignored_where = "nowhere" if refused and not isinstance(need, Lists) else "anywhere"
            if key in last and facts[fact] != KEYS[fact].default:
                report(key, typed, f"{key}, {place}", f"it needs {need}", ignored_where)
    notes += [_no_effect(typed, *why) for why, typed in ignored.items()]
    return problems


def _no_effect(settings: Sequence[str], where: str, reason: str) -> str:
    """Makes the message that `settings`, from the source `where`, have no effect.

    `reason` is in the singular; it is made plural for several settings.
    """
    if len(settings) == 1:
        return f"{settings[0]} ({where}) has no effect: {reason}"
    for one, several in {"it is": "they are", "it needs": "they need", "reads it": "reads them"}.items():
        reason = reason.replace(one, several)
    return f"{', '.join(settings)} ({where}) have no effect: {reason}"


def _of_others(key: str, command: str, unread: Sequence[Requires]) -> tuple[str, str] | None:
    """Returns why `command` does not read a key, and where it may be ignored, as `Key.ignored`; None if it does."""
    need = next((each for each in unread if key in each.keys), None)
    commands, ignored = KEYS[key].commands, "anywhere" if isinstance(need, Lists) else KEYS[key].ignored
    if need and need.one_of:
        return f"{command} reads it only with {need}", ignored
    if need or (command and commands and command not in commands):
        return f"it is for {(*commands, 'src.train')[0]}, and this is {command}", ignored
    return None


def _listed(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any], bool]]:
    """Yields each layer in `decoder_segments` and each entry of `datasets` and `eval_datasets`.

    For each: the key of the list, the entry's place for messages, its keys with their values, and whether a setting
    without effect is an error.
    """
    for number, entry in enumerate(config.get("decoder_segments", ()), 1):
        for facts in entry["pattern"]:
            yield "decoder_segments", f"segment {number}", facts, True
    for is_eval, name in enumerate(("datasets", "eval_datasets")):
        for entry in config.get(name, ()):
            facts = {keys[is_eval]: entry[setting] for setting, keys in SETTINGS.items() if setting in entry}
            yield name, entry["name"], facts, False


def _idle(key: str, config: Mapping[str, Any], changed: set[str], needs: Sequence[Requires]) -> tuple[str, str] | None:
    """Returns why a key affects no layer or dataset, and where it may be ignored, as `_of_others` does.

    None if it affects one, or if it is only unused because of keys that a later source has `changed`.
    """
    lists, places = _places(key, config)
    if changed & lists:
        return None
    if not places:
        whole = " and ".join(sorted(lists))
        instead = whole.replace(" and ", "=[] ")
        return f"{whole} sets it for each entry; to use this value instead, add {instead}=[]", "nowhere"
    for need in (need for need in needs if key in need.keys):
        if not changed & need.one_of.keys() and not any(need.satisfied({**config, **place}) for place in places):
            return f"it needs {need}", "anywhere" if isinstance(need, Lists) else "nowhere"
    return None


def _places(key: str, config: Mapping[str, Any]) -> tuple[set[str], list[Mapping[str, Any]]]:
    """Finds the layers, or for a key of data or decoding the datasets, that have no value of their own for `key`.

    Returns the keys whose lists may have such values (`decoder_segments`, or `datasets` and `eval_datasets`), and the
    settings of each layer or dataset found. {} stands for all layers, for a single dataset, or for parts of the model
    outside of layers.
    """
    # Keys of decoding depend on datasets too, because texts need a tokenizer, and synthetic data have none.
    if KEYS[key].section not in ("data", "decoding"):
        layers = [facts for entry in config.get("decoder_segments", ()) for facts in entry["pattern"]] or [{}]
        return {"decoder_segments"}, [facts for facts in layers if key not in facts] + [{}] * (key in AROUND_LAYERS)
    setting = next((setting for setting, keys in SETTINGS.items() if key in keys), key)
    names = SETTINGS.get(setting, (key, key))
    instead = SHARED.get(config.get("dataset_type", ""), {})
    lists = {
        name for name, of in zip(("datasets", "eval_datasets"), names, strict=True) if key in (of, instead.get(of))
    }
    entries = [entry for name in lists for entry in config.get(name) or ({},)]
    return lists, [entry for entry in entries if setting not in entry]
