"""The page for those who come from SageMaker says of everything where it went."""

from __future__ import annotations

import re

import smdistributed.dataparallel.torch.distributed as v1
import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel.settings.config import Config
from tests.support.ranks import ROOT

CODE = re.compile(r"`([^`\n]+)`")


def test_every_setting_and_every_public_name_is_on_the_page_for_sagemaker() -> None:
    page = (ROOT / "docs" / "migrating" / "sagemaker.md").read_text()
    words = set(re.findall(r"\w+", " ".join(CODE.findall(page))))
    names = {"partitions", *Config.model_fields, *smp.__all__, *v1.__all__}
    assert not sorted(names - words), "the page does not say where these are"
