"""The reference seller with a handler that stops for good, before or after its commit.

It makes the file ``inside`` when it is there, so that a test knows when to kill it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.interop.serving import load_seller

seller = load_seller()
INSIDE = Path(os.environ["STUCK_SELLER_INSIDE"])
WHERE = os.environ["STUCK_SELLER_WHERE"]


class Stuck(seller.Seller):  # type: ignore[name-defined,misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        whole = self.tools["create_media_buy"]

        async def create_media_buy(params: Any, caller: Any) -> Any:
            answer = await whole(params, caller)
            await self.stop("committed")
            return answer

        self.tools["create_media_buy"] = create_media_buy

    async def book(self, *args: Any) -> None:
        await super().book(*args)
        await self.stop("written")

    async def stop(self, here: str) -> None:
        if here == WHERE:
            INSIDE.touch()
            await asyncio.Event().wait()


asyncio.run(seller.serve(seller.arguments(), Stuck))
