"""The runs of the layout matrix, which several files look at."""

import pytest

from tests.distributed.layout_matrix import (
    LAYOUTS,
    MODES,
    TESTED_STEPS,
    instruction_cases,
    launch,
    matrix_cases,
    mode_case,
    prepare_chats,
)


@pytest.fixture(scope="session")
def runs(dataset, tmp_path_factory):
    """Run folder of every (precision, layout) and of every mode; three launches in all."""
    folder = tmp_path_factory.mktemp("layouts")
    chats = prepare_chats(folder / "chats", dataset)
    for world_size in LAYOUTS:
        cases = matrix_cases(world_size, folder, dataset, steps=TESTED_STEPS)
        cases += instruction_cases(world_size, folder, chats)
        if world_size == 1:
            cases += [mode_case(name, folder, dataset) for name in MODES]
        launch(world_size, cases, folder)
    return folder
