// What is done with a delivery, whatever server it came through.
"use strict";

const done = new Set(); // in your app: a table with a unique event id

/**
 * Handle one delivery that was verified already.
 *
 * It may come again: if the answer to a first copy is lost on its way, nobody can know whether it
 * was handled. So the effect is made under the event's id, and a second copy changes nothing.
 *
 * @param {Record<string, string | undefined>} headers names in lower case
 * @param {Buffer} body the provider's bytes, as they came
 * @returns {{status: number, text: string}} 2xx: done with; anything else: send it again
 */
function handle(headers, body) {
  const id = headers["oncekey-event-id"];
  const sender = headers["oncekey-sender"];
  if (!id || !sender) {
    return { status: 400, text: "this is no delivery of the gateway's\n" };
  }
  const key = `${sender} ${id}`;
  if (done.has(key)) {
    console.log(`again: ${id} of ${sender}`);
    return { status: 200, text: "done before\n" };
  }
  const type = headers["oncekey-event-type"] || "event";
  console.log(`${type} ${id} of ${sender}: ${body.length} bytes`); // your work
  done.add(key);
  return { status: 200, text: "done\n" };
}

module.exports = { handle };
