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
  const id = headers["webhook-id"];
  const source = headers["oncekey-source"];
  if (!id || !source) {
    return { status: 400, text: "this is no delivery of the gateway's\n" };
  }
  if (done.has(id)) {
    console.log(`again: ${id} of ${source}`);
    return { status: 200, text: "done before\n" };
  }
  const type = headers["oncekey-type"] || "event";
  console.log(`${type} ${id} of ${source}: ${body.length} bytes`); // your work
  done.add(id);
  return { status: 200, text: "done\n" };
}

module.exports = { handle };
