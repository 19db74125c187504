"""``oncekey serve``: a durable inbox for webhooks, with an API and a dashboard, in one process."""
