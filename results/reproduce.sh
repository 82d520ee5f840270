#!/usr/bin/env bash
# The commands behind results/README.md, days of training. `DRY_RUN=1 results/reproduce.sh` prints them.
cd "$(dirname "$0")/.." || exit
export STEPS=1000000
export ENVS="Hopper-v4 Walker2d-v4 HalfCheetah-v4"
ALGOS="mdpo_onpolicy trpo ppo" ./benchmark.sh
critic="--critic-minibatch-size 128 --no-anneal-lr"
ALGOS=ppo SEEDS="1 2 3" ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="$critic" ./benchmark.sh
ALGOS=ppo SEEDS="1 2" ENVS=Hopper-v4 EXTRA="$critic" ./benchmark.sh
ALGOS=trpo SEEDS="1 2 3" EXTRA="--critic-epochs 10 --learning-rate 3e-4 --no-anneal-lr" ./benchmark.sh
ALGOS=trpo SEEDS=1 ENVS=Hopper-v4 EXTRA="--no-anneal-lr" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy SEEDS=1 EXTRA="--critic-epochs 10 --sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy SEEDS=2 ENVS=HalfCheetah-v4 EXTRA="--critic-epochs 10 --sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 10 --no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 EXTRA="--no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--critic-learning-rate 1e-3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 HalfCheetah-v4" SEEDS="1 2 3" EXTRA="--learning-rate 1e-3" ./benchmark.sh
for objective in kl-fixed kl-adaptive kl-annealed "kl-fixed --minibatch-size 2048" "kl-fixed --kl-direction new-old"; do
  ALGOS=ppo SEEDS="1 2 3" ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="$critic --objective $objective" ./benchmark.sh
done
for q in 1.5 2; do
  ALGOS=mdpo_onpolicy SEEDS="1 2 3" ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--critic-epochs 10 --tsallis-q $q" ./benchmark.sh
done
ALGOS=mdpo_onpolicy ENVS="Hopper-v4 Walker2d-v4" SEEDS="1 2 3" EXTRA="--anneal-lr" ./benchmark.sh
for m in 20 40; do
  ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2 3" EXTRA="--sgd-steps $m" ./benchmark.sh
done

export STEPS=10000000 SEEDS=1
ALGOS="mdpo_onpolicy trpo ppo" ENVS=HalfCheetah-v4 SEEDS="1 2 3" ./benchmark.sh
ALGOS="mdpo_onpolicy trpo ppo" ENVS=Walker2d-v4 ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2" EXTRA="--critic-learning-rate 1e-3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2 3" EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=Walker2d-v4 EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="HalfCheetah-v4 Walker2d-v4" EXTRA="--critic-epochs 10 --no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 EXTRA="--anneal-lr" ./benchmark.sh

export STEPS=1000000 PRESET=minimal SEEDS="1 2 3"
ALGOS="mdpo_offpolicy sac" ./benchmark.sh
ALGOS=mdpo_tsallis ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--log-q joint" ./benchmark.sh
ALGOS=mdpo_tsallis ENVS=Hopper-v4 EXTRA="--tsallis-q 1.5 --log-q joint" ./benchmark.sh
for kind in joint per-dimension; do
  STEPS=300000 ALGOS=mdpo_tsallis ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--log-q $kind" ./benchmark.sh
  STEPS=500000 ALGOS=mdpo_tsallis ENVS=Ant-v4 SEEDS="1 2 3" EXTRA="--log-q $kind" ./benchmark.sh
done
PRESET=loaded STEPS=200000 SEEDS=1 ALGOS="mdpo_offpolicy sac" ENVS="Hopper-v4 HalfCheetah-v4" ./benchmark.sh
ablate="${DRY_RUN:+echo} python tools/ablate.py sac.py"
$ablate target-q --env-id HalfCheetah-v4 --preset minimal --compile
for seed in 1 2; do
  $ablate critic-first+min-q --env-id HalfCheetah-v4 --preset minimal --seed $seed --compile
  $ablate critic-first+min-q+target-q --env-id HalfCheetah-v4 --preset minimal --seed $seed --compile
done
${DRY_RUN:+echo} python report.py
