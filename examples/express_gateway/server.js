// An Express app that gets webhooks which were verified and deduplicated before. See README.md.
"use strict";

const express = require("express");
const { handle } = require("./deliveries");

const app = express();
const anything = express.raw({ type: () => true, limit: "1mb" }); // bytes, not parsed

app.post("/webhooks", anything, (request, response) => {
  const body = Buffer.isBuffer(request.body) ? request.body : Buffer.alloc(0);
  const { status, text } = handle(request.headers, body);
  response.status(status).type("text/plain").send(text);
});

// Whoever can reach this port is believed: let it be the gateway alone.
const server = app.listen(Number(process.env.PORT || 3000), "127.0.0.1", (error) => {
  if (error) throw error; // such as a port that is taken
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
