"""Sports Stack's webhooks in Flask with PostgreSQL: every event changes the score once.

    pip install "oncekey[flask,postgres]" gunicorn
    export DATABASE_URL=postgresql://user:password@localhost/sports SPORTSSTACK_SECRET=s3cret
    oncekey migrate "$DATABASE_URL"
    psql "$DATABASE_URL" -c 'CREATE TABLE scores (game text, team text, points int,
                             PRIMARY KEY (game, team))'
    gunicorn --workers 4 'sports_stack_flask:create_app()'

Points are added up, so that an event which is handled twice would be seen. It can't be: the score
and the mark "handled" are one transaction, under the hash that each event carries. Events are
remembered for 30 days, as Sports Stack's guide asks. To send one three times:

    echo '{"event": {"hash": "a1", "game": "g1", "team": "home", "points": 3}}' > event.json
    HOOK=http://localhost:8000/webhooks/sports-stack
    oncekey send $HOOK sports-stack event.json --times 3 --secret-env SPORTSSTACK_SECRET
"""

import os
from typing import Any

from flask import Flask

from oncekey import PostgresStore
from oncekey.adapters.flask import Webhooks
from oncekey.errors import PermanentError
from oncekey.receiver import DeadLetter, WebhookEvent
from oncekey.signatures import provider


def create_app(database: str | None = None, secret: str | None = None) -> Flask:
    app = Flask(__name__)
    store = PostgresStore(database or os.environ["DATABASE_URL"])
    app.extensions["oncekey"] = store  # for whoever ends the app to close
    webhooks = Webhooks(app, store=store)
    sports_stack = provider("sports-stack", secret=secret or os.environ["SPORTSSTACK_SECRET"])

    def give_up(letter: DeadLetter) -> None:
        app.logger.error("event %s can't be handled: %s", letter.event.id, letter.error)

    @webhooks.on("/webhooks/sports-stack", sports_stack, transactional=True, dead_letters=give_up)
    def score(event: WebhookEvent, tx: Any) -> None:
        try:
            play = event.payload["event"]
            row = (play["game"], play["team"], int(play["points"]))
        except (KeyError, TypeError, ValueError) as error:
            # No retry can help: answered with a 2xx, so that it does not come again.
            raise PermanentError(f"no score in it: {error!r}") from error
        tx.connection.execute(
            "INSERT INTO scores VALUES (%s, %s, %s) ON CONFLICT (game, team) "
            "DO UPDATE SET points = scores.points + excluded.points",
            row,
        )

    return app
