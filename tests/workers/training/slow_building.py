"""`slipstream train` whose rank 1 takes some seconds to build its part of the model: slow_building.py SECONDS train ...

It starts its ranks itself, by forking: they have what is changed here.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from slipstream.cli import main
from slipstream.train import trainer

seconds, own = float(sys.argv.pop(1)), trainer.make_pipeline


def make_pipeline(*given: Any, **options: Any) -> Any:
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    return own(*given, **options)


trainer.make_pipeline = make_pipeline
main()
