"""The gate of sizes: a folder, a file or a class name too many is refused, and so is a permission nobody needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.sizes import main, mistakes, sizes


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A product that is within every size, by one."""
    package = tmp_path / "services" / "mill"
    package.mkdir(parents=True)
    for i in range(16):
        (package / f"wheel_{i}.py").write_text(f"class Wheel{i}:\n    pass\n")
    (package / "__init__.py").write_text("\n" * 300)
    return tmp_path


def test_this_tree_is_within_its_sizes() -> None:
    assert main() == 0


def test_what_is_at_its_limit_passes(tree: Path) -> None:
    assert mistakes(sizes(tree), {}) == []


def test_a_module_too_many_is_refused(tree: Path) -> None:
    (tree / "services" / "mill" / "stone.py").write_text("")
    assert mistakes(sizes(tree), {}) == ["services/mill: 17 modules, at most 16: give it rooms"]
    assert mistakes(sizes(tree), {"modules": {"services/mill": 17}}) == []


def test_a_line_too_many_is_refused(tree: Path) -> None:
    (tree / "services" / "mill" / "wheel_0.py").write_text("\n" * 301)
    assert mistakes(sizes(tree), {}) == ["services/mill/wheel_0.py: 301 lines, at most 300: divide it by its nouns"]
    assert mistakes(sizes(tree), {"lines": {"services/mill/wheel_0.py": 301}}) == []


def test_a_class_name_that_is_taken_is_refused_unless_it_is_private_or_a_tests(tree: Path) -> None:
    (tree / "tests").mkdir()
    (tree / "tests" / "fakes.py").write_text("class Wheel0:\n    pass\n")
    (tree / "services" / "mill" / "wheel_1.py").write_text("class _Spoke:\n    pass\n")
    (tree / "services" / "mill" / "wheel_2.py").write_text("class _Spoke:\n    pass\n\n\nclass Wheel3:\n    pass\n")
    (said,) = mistakes(sizes(tree), {})
    assert said == "Wheel3: 2 classes, at most 1: a class of one's own wants a name of its own"


def test_a_permission_that_is_larger_than_needed_is_refused(tree: Path) -> None:
    (tree / "services" / "mill" / "wheel_0.py").write_text("\n" * 310)
    for most, size in ((311, 310), (400, 310)):
        (said,) = mistakes(sizes(tree), {"lines": {"services/mill/wheel_0.py": most}})
        assert said.endswith(f"has {size} lines or fewer: tools/sizes.toml can say so instead of {most}")
    (said,) = mistakes(sizes(tree), {"lines": {"services/mill/wheel_0.py": 310, "services/mill/gone.py": 301}})
    assert said.startswith("services/mill/gone.py has 300 lines or fewer")
