#!/usr/bin/env bash
# The commands behind the pages in results/, days of training. `DRY_RUN=1 results/reproduce.sh` prints them.
cd "$(dirname "$0")/.." || exit
export STEPS=1000000
export ENVS="Hopper-v4 Walker2d-v4 HalfCheetah-v4"
ALGOS="mdpo_onpolicy trpo ppo" ./benchmark.sh
ALGOS="mdpo_onpolicy trpo ppo" ENVS="Ant-v4 Humanoid-v4 HumanoidStandup-v4" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=Ant-v4 SEEDS=1 EXTRA="--learning-rate 1e-3" ./benchmark.sh
critic="--critic-minibatch-size 128 --no-anneal-lr"
ALGOS=ppo SEEDS="1 2 3" EXTRA="$critic" ./benchmark.sh
ALGOS=trpo SEEDS="1 2 3" EXTRA="--critic-epochs 10 --learning-rate 3e-4 --no-anneal-lr" ./benchmark.sh
ALGOS=trpo SEEDS="1 2 3" EXTRA="--critic-epochs 20 --learning-rate 3e-4 --no-anneal-lr" ./benchmark.sh
ALGOS=trpo SEEDS="1 2 3" EXTRA="--learning-rate 3e-4 --no-anneal-lr" ./benchmark.sh
ALGOS=trpo SEEDS=1 ENVS=Hopper-v4 EXTRA="--no-anneal-lr" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 20" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 10 --sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 20 --sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--critic-epochs 10 --no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 EXTRA="--no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--critic-learning-rate 1e-3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 HalfCheetah-v4" SEEDS="1 2 3" EXTRA="--learning-rate 1e-3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 Hopper-v4" EXTRA="--learning-rate 1e-3 --no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2 3" EXTRA="--learning-rate 1e-3 --no-anneal-t" ./benchmark.sh
for objective in kl-fixed kl-adaptive kl-annealed "kl-fixed --minibatch-size 2048" "kl-fixed --kl-direction new-old"; do
  ALGOS=ppo SEEDS="1 2 3" ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="$critic --objective $objective" ./benchmark.sh
done
for q in 1.5 2; do
  ALGOS=mdpo_onpolicy SEEDS="1 2 3" ENVS="Walker2d-v4 HalfCheetah-v4" EXTRA="--critic-epochs 10 --tsallis-q $q" ./benchmark.sh
done
ALGOS=mdpo_onpolicy ENVS="Hopper-v4 Walker2d-v4" SEEDS="1 2 3" EXTRA="--anneal-lr" ./benchmark.sh
ALGOS=mdpo_onpolicy EXTRA="--sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="Walker2d-v4 HalfCheetah-v4" SEEDS="1 2 3" EXTRA="--sgd-steps 20 --anneal-lr" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2 3" EXTRA="--sgd-steps 40" ./benchmark.sh

export STEPS=10000000 SEEDS=1
ALGOS="mdpo_onpolicy trpo ppo" ENVS="Ant-v4 Walker2d-v4 HalfCheetah-v4 Hopper-v4" SEEDS="1 2 3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2" EXTRA="--critic-learning-rate 1e-3" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 SEEDS="1 2 3" EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=Walker2d-v4 EXTRA="--critic-epochs 10" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="HalfCheetah-v4 Walker2d-v4" SEEDS="1 2" EXTRA="--critic-epochs 20" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="HalfCheetah-v4 Walker2d-v4" EXTRA="--critic-epochs 10 --no-anneal-t" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 EXTRA="--anneal-lr" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS="HalfCheetah-v4 Walker2d-v4" SEEDS="1 2" EXTRA="--sgd-steps 20" ./benchmark.sh
ALGOS=mdpo_onpolicy ENVS=HalfCheetah-v4 EXTRA="--sgd-steps 20 --anneal-lr" ./benchmark.sh

# Off-policy. For the rows of runs.csv with policy_q=q1 update=simultaneous, use this file as it was in 624f89b.
export STEPS=1000000 PRESET=minimal SEEDS=1
ALGOS="mdpo_offpolicy mdpo_tsallis sac" ENVS="HalfCheetah-v4 Walker2d-v4 Ant-v4" SEEDS="1 2 3" ./benchmark.sh
ALGOS="mdpo_offpolicy sac" ENVS=Hopper-v4 SEEDS="1 2 3" ./benchmark.sh
ALGOS=mdpo_tsallis ENVS=Hopper-v4 SEEDS="1 2 3" EXTRA="--tsallis-q 1.5" ./benchmark.sh
PRESET=loaded ALGOS="mdpo_offpolicy sac" ENVS=HalfCheetah-v4 ./benchmark.sh
STEPS=300000 ALGOS=sac ENVS=Humanoid-v4 ./benchmark.sh
STEPS=300000 ALGOS=mdpo_tsallis ENVS=Humanoid-v4 SEEDS="1 2 3" ./benchmark.sh
STEPS=300000 ALGOS=mdpo_tsallis ENVS=Humanoid-v4 SEEDS="1 2 3" EXTRA="--log-q joint" ./benchmark.sh
ablate="${DRY_RUN:+echo} python tools/ablate.py"
$ablate sac.py large-last-layer --env-id Humanoid-v4 --preset minimal --total-timesteps 300000 --compile
halfcheetah="--env-id HalfCheetah-v4 --preset minimal --compile --seed"
for seed in 1 2 3; do
  for variant in none q1 simultaneous q1+simultaneous+target-q; do
    $ablate sac.py $variant $halfcheetah $seed
  done
  for task in Hopper-v4 Walker2d-v4 HalfCheetah-v4; do
    $ablate mdpo_onpolicy.py fast-log-std --env-id $task --seed $seed --compile
  done
done
humanoid="--env-id Humanoid-v4 --compile --seed"
for variant in joint-clip minibatch-advantages online-statistics joint-clip+minibatch-advantages+online-statistics; do
  for seed in 1 2 3 4; do $ablate ppo.py $variant $humanoid $seed; done
done
$ablate sac.py target-q $halfcheetah 1
$ablate sac.py target-q $halfcheetah 2

# Not training runs of ours: SBX's SAC (pip install sbx-rl), stable-baselines3's PPO, discounted and mean-action returns.
run="${DRY_RUN:+echo} python"
$run tools/peers.py --steps 1000000 --seeds 1 2 3
$run tools/peers.py --algorithm ppo --env-id Humanoid-v4 --seeds 1 2 3
$run tools/discounted.py runs/Hopper-v4__{mdpo_onpolicy__loaded-gae__10000000__{1,3},{trpo,ppo}__loaded-gae__10000000__{1,2,3}} \
  results/agents/{HalfCheetah-v4__{mdpo_onpolicy,trpo,ppo},Walker2d-v4__{mdpo_onpolicy,trpo,ppo}}__loaded-gae
$run tools/stages.py runs/Ant-v4__{mdpo_onpolicy__loaded-gae__10000000__2,trpo__loaded-gae__10000000__{1,2},ppo__loaded-gae__10000000__2} \
  runs/Walker2d-v4__{ppo,trpo}__loaded-gae__10000000__3
for name in HalfCheetah-v4__mdpo_onpolicy__loaded-gae__1000000__{1,2,3}__critic-epochs-10; do
  $run mdpo_onpolicy.py --evaluate --run-name "$name"
done
for name in HalfCheetah-v4__ppo__loaded-gae__1000000__{1,2,3}__critic-minibatch-size-128_no-anneal-lr; do
  $run ppo.py --evaluate --run-name "$name"
done
for algo in mdpo_offpolicy sac; do
  $run $algo.py --evaluate --eval-episodes 100 --run-name "HalfCheetah-v4__${algo}__loaded__1000000__1"
done
for name in {HalfCheetah,Walker2d,Ant}-v4__{mdpo_offpolicy,mdpo_tsallis,sac}__minimal__1000000__{1,2,3} \
  Hopper-v4__{mdpo_offpolicy,sac}__minimal__1000000__{1,2,3} Hopper-v4__mdpo_tsallis__minimal__1000000__{1,2,3}__tsallis-q-1.5; do
  algo=${name#*__}
  $run "${algo%%__*}.py" --evaluate --eval-episodes 100 --run-name "$name"
done
$run report.py
$run tools/gif.py {Ant,HalfCheetah,Walker2d}-v4__mdpo_onpolicy__loaded-gae
