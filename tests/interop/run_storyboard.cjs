// Runs a storyboard against an agent and prints what became of each step as one line of JSON.
//   node run_storyboard.cjs <folder with node_modules> <agent's MCP URL> <storyboard file>
// The exit code says only whether the run came to its end: a failed step is in the output.
const { createRequire } = require('node:module');
const path = require('node:path');

async function main([folder, url, file]) {
  const installed = createRequire(path.join(path.resolve(folder), 'package.json'));
  const { loadStoryboardFile, runStoryboard } = installed('@adcp/sdk/testing');
  const run = await runStoryboard(url, loadStoryboardFile(file), { protocol: 'mcp', allow_http: true });
  const steps = run.phases.flatMap(phase => phase.steps.map(step => ({
    id: step.step_id,
    outcome: step.skipped ? 'skipped' : step.passed ? 'passed' : 'failed',
    why: step.skip?.reason ?? step.error ?? null,
    faults: (step.validations ?? []).filter(check => !check.passed).map(check => `${check.description}: ${check.error}`),
  })));
  console.log(JSON.stringify({ passed: run.passed_count, failed: run.failed_count, steps }));
}

main(process.argv.slice(2)).catch(error => {
  console.error(error);
  process.exitCode = 1;
});
