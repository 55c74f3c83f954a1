"""Settings of published experiments: BASE.yaml, and BASE/METHOD.yaml on top of it.

`--config BASE/METHOD` names a preset; `files` lists the files that it stands for.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
_FORMER = "experiments/configs/"  # the presets' former folder, which drivers may still name


def names() -> list[str]:
    """The names of all presets: BASE, BASE/METHOD, …"""
    return sorted(
        path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")
    )


def files(name: str) -> list[Path]:
    """The files of a preset, to be read in this order: BASE.yaml before BASE/METHOD.yaml.

    A path in the presets' former folder stands for that file alone. An unknown name gives [].
    """
    if _FORMER in name:
        path = FOLDER / name.rpartition(_FORMER)[2]
        return [path] if path.is_file() else []
    if name not in names():
        return []
    base = name.partition("/")[0]
    return [FOLDER / f"{part}.yaml" for part in dict.fromkeys((base, name))]
