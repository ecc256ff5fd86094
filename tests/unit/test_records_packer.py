"""A record packed from names is what numpy reads back. [R10]"""

import struct

import numpy as np
import pytest

from glm53d.ipc.records import ABORT, GENERATE, OUTPUT, Packer


@pytest.mark.parametrize("dtype", [GENERATE, ABORT, OUTPUT], ids=["generate", "abort", "output"])
def test_every_field_lands_where_its_dtype_says(dtype):
    values = {name: i + 1 for i, name in enumerate(dtype.names)}
    row = np.frombuffer(Packer(dtype)(**values), dtype, 1)[0]
    assert {name: row[name].item() for name in dtype.names} == values


def test_fields_that_are_not_named_are_zero():
    row = np.frombuffer(Packer(GENERATE)(handle=7), GENERATE, 1)[0]
    assert row["handle"] == 7 and not any(row[name] for name in GENERATE.names if name != "handle")


def test_a_value_that_does_not_fit_raises():
    with pytest.raises(struct.error):
        Packer(GENERATE)(num_prompt_ids=-1)
