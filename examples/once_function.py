"""A function with one recorded outcome for each key, in every process that uses the same file.

    python once_function.py orders.db

Run it twice: the second time nothing is charged, and the receipts are the same.
"""

import sys
from dataclasses import dataclass

from oncekey import IdempotencyConflictError, Once


@dataclass
class Receipt:
    order_id: str
    cents: int


def main(database: str = "orders.db") -> list[Receipt]:
    once = Once(f"sqlite:///{database}", scope="charges", ttl=7 * 86_400)

    @once(key="order_id")
    def charge(order_id: str, cents: int) -> Receipt:
        print(f"charging {order_id}: {cents} cents")
        return Receipt(order_id, cents)

    receipts = [charge("o-1", 500), charge("o-1", 500), charge("o-2", 700)]
    try:
        charge("o-1", 999)
    except IdempotencyConflictError as error:
        print(error)
    once.store.close()
    return receipts


if __name__ == "__main__":
    for receipt in main(*sys.argv[1:]):
        print(receipt)
